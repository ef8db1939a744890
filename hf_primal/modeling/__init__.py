"""The files that travel with every converted model, copied as they are."""

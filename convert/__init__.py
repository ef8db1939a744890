"""From a model's name to a converted, proven folder: the command and what it is made of."""

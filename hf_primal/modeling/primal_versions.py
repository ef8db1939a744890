"""Which releases of Transformers this code runs with."""

import re

OLDEST_TRANSFORMERS = "5.4"  # below it, tied heads of custom models reload without weights, and caches are others


def check_transformers(installed: str) -> None:
    """Refuse a release that is too old.

    Raises:
        ImportError: what is installed, and what to install.
    """
    given, oldest = ([int(n) for n in re.findall(r"\d+", text)[:2]] for text in (installed, OLDEST_TRANSFORMERS))
    if given < oldest:
        raise ImportError(
            f"hf-primal needs transformers>={OLDEST_TRANSFORMERS}, and {installed} is installed; "
            f'pip install "transformers>={OLDEST_TRANSFORMERS}"'
        )

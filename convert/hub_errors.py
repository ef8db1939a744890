"""Errors of the hub in one line that says what to do, with no token in it."""

import logging
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import huggingface_hub.constants
from huggingface_hub.errors import HfHubHTTPError

from hf_primal.convert.hub import first_line

SECRET = "(token)"  # what stands where a token stood
EXPECTED: tuple[type[Exception], ...] = (  # the last are the base of the errors of the HTTP library, whichever that is
    ValueError,
    RuntimeError,
    OSError,
    *(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)),
)


@contextmanager
def errors_in_one_line(name: str, token: str) -> Iterator[None]:
    """Let the hub's client be silent, and turn its errors into a `ValueError` of one line without the token."""
    client = logging.getLogger("huggingface_hub")
    level = client.level
    client.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except EXPECTED as error:
        line = " ".join(explain(error, name).split()).replace(token, SECRET)
        shown = token not in "".join(traceback.format_exception(error))
        raise ValueError(line) from (error if shown else None)
    finally:
        client.setLevel(level)


def explain(error: Exception, name: str) -> str:
    """What went wrong, and what to do."""
    if not isinstance(error, HfHubHTTPError):
        if isinstance(error, ValueError):
            return str(error)
        hub = huggingface_hub.constants.ENDPOINT
        return f"the connection to {hub} broke ({first_line(error)}); push again, what was uploaded is kept"
    status = error.response.status_code
    said = error.server_message or first_line(error)
    known = {
        401: "the hub does not accept this Hugging Face token: run `hf auth login` or set HF_TOKEN",
        403: f"you may not write to {name}: it belongs to somebody else, or this token has no write permission",
        404: f"the hub has no {name} that this token may write to",
        409: f"somebody else is changing {name} (the hub says: {said}); push again",
        429: "too many requests for the hub; push again in some minutes",
    }
    if status in known:
        return f"{known[status]} ({status})"
    if status >= 500:
        return f"the hub has a fault; push again later ({status})"
    return f"the hub refuses {name}: {said} ({status})"

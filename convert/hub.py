"""The hub as the command meets it: what an id looks like, and not waiting a minute for a hub that is not there."""

import os
import re
import urllib.error
import urllib.request

import huggingface_hub.constants

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def go_offline_without_hub(timeout: float = 3.0) -> None:
    """Use the local cache alone when the hub does not answer, so that an unknown id fails in seconds, not a minute."""
    hub = huggingface_hub.constants
    if hub.HF_HUB_OFFLINE:
        return
    try:
        urllib.request.urlopen(urllib.request.Request(hub.ENDPOINT, method="HEAD"), timeout=timeout).close()
    except urllib.error.HTTPError:
        return  # an answer is an answer
    except OSError:
        hub.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

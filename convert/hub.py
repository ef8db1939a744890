"""The hub as the command meets it: what an id looks like, whether it answers, and what of a local path may go there."""

import os
import re
import shlex
import urllib.error
import urllib.request
from http.client import HTTPException

import huggingface_hub.constants

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
USER_NAME = re.compile(r"(?=.{3,96}\Z)(?!.*(?:--|\.\.|\.git\Z))\w([\w.-]*\w)?/\w([\w.-]*\w)?", re.ASCII)
OUTSIDE = re.compile(r"(?:[A-Za-z]:)?[\\/]|~[\\/]|\.\.[\\/]")  # how a path begins that leads out of this folder


def hub_answers(timeout: float = 3.0) -> bool:
    """Whether anything answers at the hub's address; an error page is an answer."""
    request = urllib.request.Request(huggingface_hub.constants.ENDPOINT, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=timeout).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError, HTTPException):
        return False
    return True


def go_offline_without_hub(timeout: float = 3.0) -> None:
    """Use the local cache alone when the hub does not answer, so that an unknown id fails in seconds, not a minute."""
    hub = huggingface_hub.constants
    if not hub.HF_HUB_OFFLINE and not hub_answers(timeout):
        hub.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"


def check_name(name: str) -> None:
    """Check that a name is one that a model can be pushed to.

    Raises:
        ValueError: it is not of the form USER/NAME.
    """
    if not USER_NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is no name to push to; give USER/NAME, of letters, digits and '-', '_', '.' (not '--' or '..')"
        )


def public_command(command: str) -> str:
    """A command whose paths that lead out of this folder are cut to their last names: they tell who and where one is.

    Relative paths, hub ids and everything else stay as they are.
    """
    try:
        words = shlex.split(command)
    except ValueError:  # an open quote: no command, so nothing to cut
        return command
    return shlex.join(map(without_folders, words))


def without_folders(word: str) -> str:
    """`~/texts/mine.txt` as `mine.txt` and `--output=~/models/out` as `--output=out`; any other word as it is."""
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return f"{option}{equals}{last_name(value)}" if OUTSIDE.match(value) else word


def public_name(source: str) -> str:
    """What to call a model or dataset in public: a file or folder by its last name, a hub id by itself."""
    return last_name(source) if is_local(source) else source


def is_local(source: str) -> bool:
    """Whether a name is a path, or one of a file or folder that is here."""
    return bool(OUTSIDE.match(source)) or source.startswith("./") or os.path.exists(source)


def last_name(path: str) -> str:
    """The last name of a path of any system."""
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1] or path


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

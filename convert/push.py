"""Push a folder to the hub: all checks before the first byte is sent, then one commit; every error is one line."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub.constants
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import RepositoryNotFoundError

from hf_primal.convert.hub import check_name, first_line, hub_answers
from hf_primal.convert.hub_errors import errors_in_one_line
from hf_primal.convert.upload import check_folder, contents_to_push, refuse_secret, stale_weights


def push(folder: Path, name: str, *, private: bool = False, revision: str | None = None) -> str:
    """Upload a converted or fine-tuned model, in one commit, with all that its folder holds but leftovers of training.

    The folder stays as it is. In what is uploaded the card's code names USER/NAME instead of the local folder, the
    reports name local files without their folders, and weights of an earlier push that these replace are deleted.

    Args:
        folder: of a model with its code, tokenizer and card.
        name: USER/NAME; made if it does not exist.
        private: nobody else may see it.
        revision: branch to commit to, made from main if it does not exist; None for main.

    Returns:
        The address of what was pushed.

    Raises:
        ValueError: in one line, with no token in it: the folder is not complete or holds the token, the name is not
            one, there is no network or no token, the name is not the user's, or what the hub said.
    """
    check_name(name)
    check_folder(folder)
    api, token = open_hub(name, private)
    contents = contents_to_push(folder, name)
    refuse_secret(contents, token)
    branch = revision or "main"
    with errors_in_one_line(name, token):
        address = str(api.create_repo(name, private=private or None, exist_ok=True))  # None: as the owner's default is
        if branch != "main":
            api.create_branch(name, branch=branch, exist_ok=True)
        stale = stale_weights(api.list_repo_files(name, revision=branch), contents)
        operations = [CommitOperationAdd(path, content) for path, content in contents.items()]
        api.create_commit(
            name,
            [*operations, *(CommitOperationDelete(path) for path in stale)],
            commit_message="Upload with hf-primal",
            revision=branch,
        )
    return address if branch == "main" else f"{address}/tree/{branch}"


def open_hub(name: str, private: bool = False) -> tuple[HfApi, str]:
    """The hub, once it is sure that it can be reached and that this user may push there; and the token.

    Args:
        name: USER/NAME.
        private: what is pushed may not be public.

    Raises:
        ValueError: no network, no token or one that may not write, a name of somebody else, a public repository.
    """
    hub = huggingface_hub.constants
    if hub.HF_HUB_OFFLINE:
        raise ValueError("no network: HF_HUB_OFFLINE is set; unset it to push")
    if not hub_answers():
        raise ValueError(f"no network: {hub.ENDPOINT} does not answer; try again when it does")
    token = find_token()
    api = HfApi(token=token)
    with errors_in_one_line(name, token):
        check_account(api.whoami(), name)
        if private and is_public(api, name):
            raise ValueError(f"{name} exists and is public: --private does not hide it; do so in its settings first")
    return api, token


def find_token() -> str:
    """The token of the environment or of `hf auth login`.

    Raises:
        ValueError: there is none, or it cannot be one.
    """
    try:
        token = get_token()
    except Exception as error:  # getting one from a service may fail in ways that differ between hub releases
        raise ValueError(f"no Hugging Face token: {first_line(error)}") from error
    if not token:
        raise ValueError("no Hugging Face token: run `hf auth login` or set HF_TOKEN")
    if not re.fullmatch(r"[!-~]+", token):
        raise ValueError("the Hugging Face token has characters that no token has: run `hf auth login` or set HF_TOKEN")
    return token


def check_account(account: Mapping[str, Any], name: str) -> None:
    """Check that the token's account may write to a name, as far as the account says so.

    Args:
        account: the hub's answer to whoami.
        name: USER/NAME.

    Raises:
        ValueError: the token may only read, or the name is not the account's.
    """
    if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ValueError("this Hugging Face token may only read: make one at https://huggingface.co/settings/tokens")
    owners = [account["name"], *(organisation["name"] for organisation in account.get("orgs", []))]
    user, model = name.split("/")
    if account.get("type") == "user" and user.lower() not in (owner.lower() for owner in owners):
        raise ValueError(f"{name} is not yours: this token may push to {owners[0]}/{model}{others(owners[1:])}")


def others(owners: list[str]) -> str:
    """A clause with the organisations that a user belongs to."""
    return f", or to a model of {', '.join(owners)}" if owners else ""


def is_public(api: HfApi, name: str) -> bool:
    """Whether a repository exists and everybody can see it."""
    try:
        return not api.model_info(name).private
    except RepositoryNotFoundError:
        return False

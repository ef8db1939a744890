"""What may stop a run of `finetune.py`, each in one line with what to do."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from hf_primal.convert.hub import first_line

FULL = (errno.ENOSPC, errno.EDQUOT)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def writing(folder: Path, scratch: Path | None = None) -> Iterator[None]:
    """Around what writes to a disk: what was half written to `scratch` goes, and a full disk has one name.

    Raises:
        OSError: ENOSPC, for any of the errors that libraries raise when the disk of `folder` is full.
    """
    try:
        yield
    except BaseException as error:
        full = any(getattr(one, "errno", None) in FULL or os.strerror(errno.ENOSPC) in str(one) for one in chain(error))
        full = full or shutil.disk_usage(folder).free < 2**16  # torch.save says nothing of it
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)
        if full and isinstance(error, Exception):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise


def explain(error: BaseException) -> str | None:
    """An error in one line with what to do; None for one that has no business to happen."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        return "out of memory; lower --batch_size (and raise --accumulation), or use --gradient_checkpointing true"
    if isinstance(error, OSError) and error.errno in FULL:
        return (
            "the disk is full; free some room and go on from the last checkpoint, if there is one, with --resume true"
        )
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; go on from the last checkpoint, if there is one, with --resume true"
    return first_line(error) if isinstance(error, ValueError | OSError) else None

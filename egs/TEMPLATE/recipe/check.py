"""Check the installation, and the configurations, before any long work.

Everything is tried for real: ESPnet's parser reads the training YAML, ESPnet's task
builds the model from it, and a transducer loss is computed.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.metadata
import importlib.util
import inspect
import io
import logging
import os
import sys
import warnings
from pathlib import Path

from recipe.chunks import chunks_of
from recipe.files import RecipeError

MODULES = ("jiwer", "matplotlib", "soundfile", "tensorboard")
SHOWN = ("espnet", "torch", "torchaudio", "espnet-mega-bias")
# stand-in for a token list that is yet to be made; no model is kept that uses it
ANY_TOKENS = ["<blank>", "<unk>", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", "<space>", "<sos/eos>"]


class CheckError(Exception):
    """Something would stop the recipe; the message says what, and what mends it."""


def check_installation() -> None:
    """See whether what a recipe needs is there, and whether a loss can be computed.

    Raises:
        CheckError: If not; with the line that mends it.
    """
    if importlib.util.find_spec("espnet_mega_bias") is None:
        raise CheckError(
            f"espnet-mega-bias is not installed in {sys.executable}; "
            "pip install 'espnet-mega-bias[recipe]'"
        )
    from espnet_mega_bias.tools import installation, probes

    def findings():
        yield installation.espnet()
        torch = installation.torch(probes.outcome(probes.load_torch))
        yield torch
        torchaudio = installation.torchaudio(
            probes.outcome(probes.load_torchaudio), torch
        )
        yield torchaudio
        yield installation.loss(
            probes.outcome(probes.compute_loss), [torch, torchaudio]
        )
        yield installation.modules(MODULES, "recipe")

    for finding in findings():
        if finding.mend is not None:
            raise CheckError(f"{finding.subject}: {finding.text}; {finding.mend}")


def parse(parser: argparse.ArgumentParser, config: Path, *options: str):
    """Let ESPnet's parser read a YAML file.

    Raises:
        CheckError: If the file is no YAML or has a key that the parser lacks.
    """
    import yaml

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parser.parse_args(["--config", str(config), *options])
    except SystemExit as exc:
        why = said.getvalue().strip().splitlines()[-1]
        raise CheckError(f"{config}: {why.split('error: ')[-1]}") from exc
    except yaml.YAMLError as exc:
        raise CheckError(f"{config} is no YAML: {' '.join(str(exc).split())}") from exc


def chosen_class(
    choices, config: Path, args: argparse.Namespace, supplied: tuple[str, ...] = ()
) -> type:
    """Find the class that a YAML names, and see whether it has the keys given to it.

    Args:
        choices: ESPnet's `ClassChoices`, such as `decoder_choices`.
        config: The YAML, for the message.
        args: What it holds.
        supplied: Parameters of the class that are not the YAML's to give.

    Raises:
        CheckError: If the name or a key is unknown.
    """
    part, known_classes = choices.name, choices.classes
    name, conf = getattr(args, part), getattr(args, f"{part}_conf")
    if name not in known_classes:
        raise CheckError(
            f"{config}: {part}: ESPnet knows {', '.join(sorted(known_classes))}, "
            f"not {name!r}"
        )
    if not isinstance(conf, dict):
        raise CheckError(f"{config}: {part}_conf: keys expected, not {conf!r}")
    parameters = inspect.signature(known_classes[name]).parameters
    known = [key for key in parameters if key not in supplied]
    for key in conf:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = (
                f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            )
            raise CheckError(
                f"{config}: {part}_conf: {name} has no key {key!r}; {hint}"
            )
    return known_classes[name]


def check_decoder(config: Path, args: argparse.Namespace, vocab_size: int):
    """Build the decoder that the YAML names, as ESPnet's task does.

    Returns:
        The decoder's class.

    Raises:
        CheckError: If the name or a key is unknown, or a value is refused.
    """
    from espnet2.tasks.asr_transducer import decoder_choices

    if args.decoder == "mega_bias" and "mega_bias" not in decoder_choices.classes:
        raise CheckError(
            f"{config}: decoder: ESPnet does not know mega_bias; "
            f"{sys.executable} -m espnet_mega_bias doctor says why"
        )
    decoder_class = chosen_class(decoder_choices, config, args, ("vocab_size",))
    try:
        decoder_class(vocab_size, **args.decoder_conf)
    except Exception as exc:  # whatever the class says about its arguments
        raise CheckError(f"{config}: decoder_conf: {exc}") from exc
    return decoder_class


def read_tokens(path: Path) -> list[str]:
    """Read a token list.

    Raises:
        CheckError: If it is missing or empty, `<blank>` is not first, or a token comes
            twice.
    """
    try:
        tokens = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as exc:
        raise CheckError(f"the token list {path} is missing; stage 2 makes it") from exc
    if tokens[:1] != ["<blank>"]:
        first = repr(tokens[0]) if tokens else "nothing"
        raise CheckError(f"token list {path}: <blank> must be first, found {first}")
    twice = sorted({token for token in tokens if tokens.count(token) > 1})
    if twice:
        raise CheckError(
            f"token list {path}: listed more than once: {', '.join(twice)}"
        )
    return tokens


def check_lengths(
    config: Path, args: argparse.Namespace, decoder_class: type, texts: list[Path]
) -> None:
    """Compare the decoder's `max_positions` with the longest label sequence.

    Raises:
        CheckError: If a sequence (and the blank before it) has more labels than the
            decoder has positions; names both numbers.
    """
    from espnet2.text.build_tokenizer import build_tokenizer

    parameters = inspect.signature(decoder_class).parameters
    if "max_positions" not in parameters:
        return

    def setting(key: str) -> int | None:
        return args.decoder_conf.get(key, parameters[key].default)

    max_positions = setting("max_positions")
    if max_positions is None or setting("chunk_size") > 0:
        return
    tokenizer = build_tokenizer(
        token_type=args.token_type,
        bpemodel=args.bpemodel,
        non_linguistic_symbols=args.non_linguistic_symbols,
        g2p_type=args.g2p,
    )
    for path in texts:
        for line in path.read_text(encoding="utf-8").splitlines():
            utt_id, _, text = line.partition(" ")
            labels = len(tokenizer.text2tokens(text))
            if labels + 1 > max_positions:
                raise CheckError(
                    f"{config}: decoder_conf: max_positions: {max_positions} is less "
                    f"than the {labels + 1} that utterance {utt_id} needs ({labels} "
                    f"labels and the blank before them), {path}"
                )


def check_train_config(
    config: Path, token_list: Path | None, texts: list[Path], options: list[str] = ()
) -> tuple[object, str]:
    """Build the model of a training YAML, and see whether it takes the training texts.

    Args:
        config: The training YAML.
        token_list: The token list; None for any.
        texts: Transcripts that the decoder must be long enough for.
        options: Further options that ESPnet's training is given.

    Returns:
        The model, and a description of it.

    Raises:
        CheckError: If the model cannot be built or cannot take the texts.
    """
    from espnet2.tasks.asr_transducer import ASRTransducerTask, normalize_choices

    tokens = ANY_TOKENS if token_list is None else read_tokens(token_list)
    options = ("--output_dir", os.devnull, "--token_list", "-", *options)
    args = parse(ASRTransducerTask.get_parser(), config, *options)
    decoder_class = check_decoder(config, args, len(tokens))
    check_lengths(config, args, decoder_class, texts)
    args.token_list = tokens
    if args.normalize is not None:
        chosen_class(normalize_choices, config, args)
    if args.normalize == "global_mvn":
        args.normalize = None  # its statistics are yet to be collected
    try:
        model = ASRTransducerTask.build_model(args)
    except Exception as exc:  # from any of the model's parts
        raise CheckError(f"{config}: {type(exc).__name__}: {exc}") from exc
    size, of = (
        sum(parameter.numel() for parameter in module.parameters())
        for module in (model.decoder, model)
    )
    return model, f"decoder {args.decoder}: {size:,} of the model's {of:,} parameters"


def check_decode_config(config: Path, model) -> str | None:
    """Build the beam search of a decoding YAML; with ``streaming``, try the encoder.

    Returns:
        What to mind in streaming, if anything.

    Raises:
        CheckError: If a key is unknown or a value is refused.
    """
    from espnet2.asr_transducer.beam_search_transducer import BeamSearchTransducer
    from espnet2.bin.asr_transducer_inference import get_parser

    data = ("--data_path_and_name_and_type", "wav.scp,speech,sound")
    args = parse(get_parser(), config, "--output_dir", os.devnull, *data)
    try:
        BeamSearchTransducer(
            model.decoder,
            model.joint_network,
            beam_size=args.beam_size,
            nbest=args.nbest,
            **{"streaming": args.streaming, **args.beam_search_config},
        )
    except Exception as exc:  # ESPnet asserts, or refuses the keyword
        raise CheckError(f"{config}: {exc}") from exc
    if not args.streaming:
        return None
    try:
        return chunks_of(
            model,
            args.decoding_window,
            args.left_context,
            model.encoder.dynamic_chunk_training,
        ).remark()
    except RecipeError as exc:
        raise CheckError(f"{config}: {exc}") from exc


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train_config", type=Path, help="else the installation only")
    parser.add_argument("--decode_config", type=Path, action="append", default=[])
    parser.add_argument("--token_list", type=Path)
    parser.add_argument("--text", type=Path, action="append", default=[])
    # the rest is for ESPnet's parser: the kind of tokens, the size of features
    args, options = parser.parse_known_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        check_installation()
        if args.train_config is None:
            versions = (f"{name} {importlib.metadata.version(name)}" for name in SHOWN)
            found = f"Python {sys.version.split()[0]}, {', '.join(versions)}"
        else:
            remarks = io.StringIO()  # of ESPnet's imports, on extras that are missing
            with (
                contextlib.redirect_stdout(remarks),
                contextlib.redirect_stderr(remarks),
            ):
                model, found = check_train_config(
                    args.train_config, args.token_list, args.text, options
                )
                for config in args.decode_config:
                    if remark := check_decode_config(config, model):
                        found += f"\n  {config}: {remark}"
    except (CheckError, OSError) as exc:
        message = " ".join(str(exc).split())
        print(f"check.py: error: {message}", file=sys.stderr)
        return 1
    print(f"  {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

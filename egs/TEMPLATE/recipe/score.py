"""Count word and character errors for each set and search, and write the table.

RESULTS.md is for the reader, results.json beside it has the same facts for
recipe.compare.

score.py --datadir DIR --sets NAME ... --train DIR --logs DIR --output RESULTS.md
         --decode_dirs DIR ...
score.py --show RESULTS.md [--max_train_wer X]
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from recipe.files import RecipeError, replacing

HEADER = (
    "| search | set | utterances | words | word errors | WER % "
    "| characters | character errors | CER % |\n"
    "|---|---|---:|---:|---:|---:|---:|---:|---:|\n"
)
ROW = re.compile(
    r"^\| (?P<search>[^|]+) \| (?P<set>[^|]+) \|(?:[^|]*\|){3} *(?P<wer>[\d.]+) \|"
)
DECODED = re.compile(
    r"^(?:\[\S+\] )?(?P<time>[\d-]+ [\d:,]+) "
    r".*Final best hypothesis: \['(?P<utt>[^']+)'\]"
)
EPOCH_RESULTS = re.compile(r"\d+epoch results: (?P<parts>.*)")
DURATION = re.compile(
    r"\btime=(?:(?P<h>\d+) hours?,? )?(?:(?P<m>\d+) minutes?,? )?"
    r"(?:and )?(?P<s>[\d.]+) sec"
)


@dataclass(frozen=True)
class Errors:
    """Errors on one set: substitutions, deletions and insertions together.

    Args:
        utterances: Number of utterances.
        words: Number of words that were said.
        word_errors: Number of wrong words.
        characters: Number of characters that were said, spaces included.
        character_errors: Number of wrong characters.
        by_utterance: Number of wrong words in each utterance.
    """

    utterances: int
    words: int
    word_errors: int
    characters: int
    character_errors: int
    by_utterance: dict[str, int]

    @property
    def wer(self) -> float:
        """Word error rate in %."""
        return 100 * self.word_errors / self.words

    @property
    def cer(self) -> float:
        """Character error rate in %."""
        return 100 * self.character_errors / self.characters


def read_text(path: Path) -> dict[str, str]:
    """Read a file of lines that are an utterance's name and its words."""
    lines = path.read_text(encoding="utf-8").splitlines()
    pairs = (line.partition(" ") for line in lines if line.strip())
    return {utt_id: " ".join(text.split()) for utt_id, _, text in pairs}


def count_errors(references: dict[str, str], hypotheses: dict[str, str]) -> Errors:
    """Align hypotheses with references.

    Raises:
        ValueError: If an utterance has no hypothesis (an empty one is one).
    """
    import jiwer

    missing = sorted(references.keys() - hypotheses.keys())
    if missing:
        raise ValueError(f"not decoded: {', '.join(missing)}")
    said = list(references.values())
    heard = [hypotheses[utt_id] for utt_id in references]
    words = jiwer.process_words(said, heard)
    characters = jiwer.process_characters(said, heard)

    def totals(output: object) -> tuple[int, int]:
        errors = output.substitutions + output.deletions
        return output.hits + errors, errors + output.insertions

    by_utterance = {
        utt_id: sum(
            max(
                chunk.ref_end_idx - chunk.ref_start_idx,
                chunk.hyp_end_idx - chunk.hyp_start_idx,
            )
            for chunk in alignment
            if chunk.type != "equal"
        )
        for utt_id, alignment in zip(references, words.alignments, strict=True)
    }
    return Errors(len(references), *totals(words), *totals(characters), by_utterance)


def real_time_factor(log: Path, durations: dict[str, float]) -> float | None:
    """Return how long decoding took for each second of speech.

    From the end of the first utterance to that of the last one, so that neither the
    start nor the loading of the model counts.

    Args:
        log: Log of ESPnet's decoding.
        durations: Seconds of each utterance.

    Returns:
        Seconds per second; None for fewer than two utterances.
    """
    matches = map(DECODED.match, log.read_text(encoding="utf-8").splitlines())
    ends = [(match["utt"], match["time"]) for match in matches if match]
    if len(ends) < 2:
        return None
    first, last = (
        datetime.datetime.strptime(ends[index][1], "%Y-%m-%d %H:%M:%S,%f")
        for index in (0, -1)
    )
    spoken = sum(durations[utt] for utt, _ in ends[1:])
    return (last - first).total_seconds() / spoken


def minutes_of_training(log: Path) -> float:
    """Return what the epochs in a log of ESPnet's training took together."""
    seconds = 0.0
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if results := EPOCH_RESULTS.search(line):
            for part in DURATION.finditer(results["parts"]):
                hours, minutes = (int(part[unit] or 0) for unit in "hm")
                seconds += 3600 * hours + 60 * minutes + float(part["s"])
    return seconds / 60


def model_facts(train: Path, log: Path) -> dict:
    """Tell which model was trained, and how long.

    Args:
        train: ESPnet's output_dir.
        log: Log of the training.
    """
    from espnet_mega_bias.tools.quiet import quiet_imports, quiet_logs
    from recipe.checkpoint import load

    with quiet_imports(), quiet_logs():
        from espnet2.tasks.asr_transducer import ASRTransducerTask

        model, config = ASRTransducerTask.build_model_from_file(train / "config.yaml")
    states = load(train / "checkpoint.pth")
    size, decoder_size = (
        sum(parameter.numel() for parameter in module.parameters())
        for module in (model, model.decoder)
    )
    return {
        "train_config": config.config,
        "decoder": config.decoder,
        "seed": config.seed,
        "epochs": states["reporter"]["epoch"],
        "minutes": minutes_of_training(log),
        "parameters": size,
        "decoder_parameters": decoder_size,
    }


def model_line(facts: dict) -> str:
    """Describe the trained model in a sentence."""
    return (
        f"Decoder {facts['decoder']}: {facts['decoder_parameters']:,} of the model's "
        f"{facts['parameters']:,} parameters; {facts['epochs']} epochs with seed "
        f"{facts['seed']} in {facts['minutes']:.1f} minutes"
    )


def read_hypotheses(decode_dirs: list[Path]) -> dict[str, dict[str, str]]:
    """Return what each search, named after its folder, heard in each utterance."""
    return {
        directory.name: read_text(directory / "1best_recog" / "text")
        for directory in decode_dirs
    }


def evaluate(
    references: dict[str, dict[str, str]], hypotheses: dict[str, dict[str, str]]
) -> dict[str, dict[str, Errors]]:
    """Count the errors of each search on each set.

    Args:
        references: What was said in each utterance, for each set.
        hypotheses: What was heard in each utterance, for each search.

    Raises:
        ValueError: If an utterance was not decoded.
    """
    return {
        search: {name: count_errors(said, heard) for name, said in references.items()}
        for search, heard in hypotheses.items()
    }


def versions() -> dict[str, str]:
    """Return the versions that results depend on."""
    names = ("espnet", "torch", "torchaudio", "espnet-mega-bias")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"Python": sys.version.split()[0], **found}


def software_line(found: dict[str, str]) -> str:
    """Say the versions, from `versions`."""
    return ", ".join(f"{name} {version}" for name, version in found.items())


def report(
    errors: dict[str, dict[str, Errors]],
    title: str = "",
    note: str = "",
    about: tuple[str, ...] = (),
    utterances: str = "",
    pictures: list[Path] = (),
) -> str:
    """Return the results in Markdown.

    Args:
        errors: From `evaluate`.
        title: Name of the corpus.
        note: What the reader should know.
        about: Sentences on how this came about.
        utterances: Table of them.
        pictures: Files that the reader may look at.
    """
    lines = [f"# {title}\n\n{software_line(versions())}.\n"]
    lines += [f"{sentence}.\n" for sentence in about]
    lines += ["\n", HEADER]
    for search, sets in errors.items():
        for name, found in sets.items():
            lines.append(
                f"| {search} | {name} | {found.utterances} | {found.words} "
                f"| {found.word_errors} | {found.wer:.1f} | {found.characters} "
                f"| {found.character_errors} | {found.cer:.1f} |\n"
            )
    if note:
        lines.append(f"\n{note}\n")
    lines.append(utterances)
    lines.append("\nPictures:\n\n")
    lines += [f"- {picture}\n" for picture in pictures]
    return "".join(lines)


def utterance_table(
    references: dict[str, dict[str, str]], hypotheses: dict[str, dict[str, str]]
) -> str:
    """Return what was said and heard in each utterance, in Markdown."""
    lines = [f"\n| set | utterance | said | {' | '.join(hypotheses)} |\n"]
    lines.append("|---" * (3 + len(hypotheses)) + "|\n")
    for name, said in references.items():
        for utt_id, text in said.items():
            heard = " | ".join(texts[utt_id] for texts in hypotheses.values())
            lines.append(f"| {name} | {utt_id} | {text} | {heard} |\n")
    return "".join(lines)


def check_train_wer(results: str, train_set: str, limit: float) -> None:
    """Compare the training set's word error rates in a report with `limit`, in %.

    Raises:
        ValueError: If one is above it; names the search.
    """
    matches = filter(None, map(ROW.match, results.splitlines()))
    rows = [match for match in matches if match["set"] == train_set]
    if not rows:
        raise ValueError("the results have no row for the training set")
    for row in rows:
        if float(row["wer"]) > limit:
            raise ValueError(
                f"the training set was not learnt: WER {row['wer']} % with "
                f"{row['search']}, above {limit:g} %"
            )


def speed_line(factors: dict[str, float | None]) -> str:
    """Say the real-time factor of each search."""
    said = [f"{name} {factor:.2f}" for name, factor in factors.items() if factor]
    return f"Real-time factor, front-end and encoder included: {', '.join(said)}"


def score(args: argparse.Namespace) -> str:
    """Write RESULTS.md and results.json; return the former's text."""
    references = {name: read_text(args.datadir / name / "text") for name in args.sets}
    hypotheses = read_hypotheses(args.decode_dirs)
    errors = evaluate(references, hypotheses)
    durations = {
        utt: float(seconds)
        for name in args.sets
        for utt, seconds in read_text(args.datadir / name / "utt2dur").items()
    }
    factors = {
        search: real_time_factor(args.logs / f"{search}.log", durations)
        for search in hypotheses
    }
    facts = model_facts(args.train, args.logs / "train.log")
    results = report(
        errors,
        args.title,
        args.note,
        (model_line(facts), speed_line(factors)),
        utterance_table(references, hypotheses) if args.list_utterances else "",
        args.picture,
    )
    if args.fold:
        facts["fold"] = {"name": args.fold, "options": args.fold_options}
    facts["versions"] = versions()
    facts["searches"] = {
        search: {
            "real_time_factor": factors[search],
            "sets": {name: asdict(found) for name, found in sets.items()},
        }
        for search, sets in errors.items()
    }
    with replacing(args.output.with_name("results.json")) as partial:
        partial.write_text(json.dumps(facts, indent=1), encoding="utf-8")
    with replacing(args.output) as partial:
        partial.write_text(results, encoding="utf-8")
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--datadir", type=Path)
    parser.add_argument("--sets", nargs="+")
    parser.add_argument("--decode_dirs", nargs="+", type=Path)
    parser.add_argument("--train", type=Path, help="ESPnet's output_dir")
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--title", default="")
    parser.add_argument("--note", default="")
    parser.add_argument("--fold", help="which division of the corpus this is")
    parser.add_argument("--fold_options", default="", help="those of run.sh for it")
    parser.add_argument("--list_utterances", action="store_true")
    parser.add_argument("--picture", type=Path, action="append", default=[])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--show", type=Path)
    parser.add_argument("--max_train_wer", type=float)
    parser.add_argument("--train_set", default="train")
    args = parser.parse_args()
    try:
        if args.show is None:
            results = score(args)
        else:
            results = args.show.read_text(encoding="utf-8")
            print(f"\n{results}\nThis table: {args.show}")
        if args.max_train_wer is not None:
            check_train_wer(results, args.train_set, args.max_train_wer)
    except FileNotFoundError as exc:
        error = f"{exc.filename} is missing; an earlier stage makes it"
    except (RecipeError, ValueError, OSError) as exc:
        error = exc
    else:
        return 0
    print(f"score.py: error: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

"""Put the results of several trainings of one recipe into one table.

compare.py --title NAME --experiments DIR ... --output RESULTS.md
           [--reference CONFIG] [--notes FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recipe.files import RecipeError, replacing
from recipe.score import software_line

RESAMPLES = 10_000
TEXT_COLUMNS = {"configuration", "division", "search", "set", "range"}


@dataclass(frozen=True)
class Outcome:
    """One training, decoded with one search.

    Args:
        facts: What recipe.score says of the training.
        search: Name of the search.
    """

    facts: dict
    search: str

    @property
    def name(self) -> str:
        """The configuration's name."""
        return Path(self.facts["train_config"]).stem

    @property
    def seed(self) -> int:
        """The training's seed."""
        return self.facts["seed"]

    @property
    def fold(self) -> str:
        """Which division of the corpus it is, if there are several."""
        return self.facts.get("fold", {}).get("name", "")

    @property
    def command(self) -> str:
        """What trains and decodes it."""
        options = self.facts.get("fold", {}).get("options", "")
        config = f"conf/{self.name}.yaml"
        return f"./run.sh --train_config {config} --seed {self.seed} {options}".rstrip()

    @property
    def sets(self) -> dict[str, dict]:
        """The errors on each set."""
        return self.facts["searches"][self.search]["sets"]

    def rate(self, name: str, unit: str = "word") -> float:
        """Return the error rate on a set, in %."""
        errors = self.sets[name]
        return 100 * errors[f"{unit}_errors"] / errors[f"{unit}s"]


def read(directories: Sequence[Path]) -> list[Outcome]:
    """Read what recipe.score left in each experiment's folder.

    Raises:
        RecipeError: If there is nothing in one, or they cannot be compared: other sets,
            another number of epochs, other versions; in one division, sets with
            another number of words.
    """
    outcomes = []
    of_fold = {}  # the first outcome of each division
    for directory in directories:
        path = directory / "results.json"
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as exc:
            raise RecipeError(f"{path} is missing; stage 6 of run.sh makes it") from exc
        except ValueError as exc:
            raise RecipeError(f"{path} is damaged ({exc}); remove it") from exc
        outcomes += [Outcome(facts, search) for search in facts["searches"]]
        first, last = outcomes[0], outcomes[-1]
        alike = of_fold.setdefault(last.fold, last)
        for what, this, other in (
            ("epochs", facts["epochs"], first.facts["epochs"]),
            ("versions", facts["versions"], first.facts["versions"]),
            ("sets", list(last.sets), list(first.sets)),
            ("words", words(last), words(alike)),
        ):
            if this != other:
                raise RecipeError(
                    f"{path}: {what} {this}, but {other} in one before it: "
                    "the trainings cannot be compared"
                )
    return outcomes


def words(outcome: Outcome) -> dict[str, int]:
    """Return how many words were said in each set."""
    return {name: errors["words"] for name, errors in outcome.sets.items()}


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; without ``division``, where the corpus has but one."""
    shown = [
        index
        for index, name in enumerate(columns)
        if name != "division" or any(row[index] for row in rows)
    ]
    rules = ["---" if columns[index] in TEXT_COLUMNS else "---:" for index in shown]
    lines = [f"| {' | '.join(columns[index] for index in shown)} |"]
    lines.append(f"|{'|'.join(rules)}|")
    lines += [f"| {' | '.join(row[index] for index in shown)} |" for row in rows]
    return "\n".join(lines) + "\n"


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a row for each training and search, in Markdown."""
    columns = ["configuration", "seed", "division", "parameters", "of the decoder"]
    columns += ["minutes", "search", "real-time factor"]
    columns += [
        f"{name} {unit} %" for name in outcomes[0].sets for unit in ("WER", "CER")
    ]
    rows = []
    for outcome in outcomes:
        facts = outcome.facts
        factor = facts["searches"][outcome.search]["real_time_factor"]
        cells = [
            outcome.name,
            str(outcome.seed),
            outcome.fold,
            f"{facts['parameters']:,}",
            f"{facts['decoder_parameters']:,}",
            f"{facts['minutes']:.0f}",
            outcome.search,
            "" if factor is None else f"{factor:.2f}",
        ]
        for name, errors in outcome.sets.items():
            cells.append(f"{outcome.rate(name):.1f} ({errors['word_errors']})")
            cells.append(f"{outcome.rate(name, 'character'):.1f}")
        rows.append(cells)
    return grid(columns, rows)


def spread(outcomes: Sequence[Outcome], over: str) -> str:
    """Return mean and spread of what is alike but for one thing, in Markdown.

    Args:
        outcomes: The trainings.
        over: What they may differ in: ``seed`` or ``fold``.

    Returns:
        A row for each configuration and set; nothing if each has one training.
    """
    other = {"seed": "fold", "fold": "seed"}[over]
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        key = (outcome.name, str(getattr(outcome, other)), outcome.search)
        groups.setdefault(key, []).append(outcome)
    rows = []
    for key, group in groups.items():
        if len(group) < 2:
            continue
        for part in group[0].sets:
            rates = [outcome.rate(part) for outcome in group]
            rows.append(
                [
                    *key,
                    part,
                    str(len(rates)),
                    f"{statistics.mean(rates):.1f}",
                    f"{statistics.stdev(rates):.1f}",
                    f"{min(rates):.1f} to {max(rates):.1f}",
                ]
            )
    if not rows:
        return ""
    called = {"seed": "seed", "fold": "division"}
    columns = ["configuration", called[other], "search", "set", f"{called[over]}s"]
    return grid([*columns, "mean WER %", "deviation", "range"], rows)


def interval(one: dict, other: dict) -> tuple[float, float, float]:
    """Compare two word error rates on the same utterances.

    A paired bootstrap over utterances (Bisani and Ney, "Bootstrap estimates for
    confidence intervals in ASR performance evaluation", ICASSP 2004). The number of
    words of an utterance is not resampled: both rates have the set's words below.

    Args:
        one: Errors on a set.
        other: Those that are subtracted.

    Returns:
        The difference of the rates in %, and the bounds of its 95 % interval.
    """
    import numpy as np

    utterances = sorted(one["by_utterance"])
    differences = np.array(
        [one["by_utterance"][utt] - other["by_utterance"][utt] for utt in utterances]
    )
    draws = np.random.default_rng(0).integers(
        len(utterances), size=(RESAMPLES, len(utterances))
    )
    low, high = np.percentile(differences[draws].sum(axis=1), [2.5, 97.5])
    scale = 100 / one["words"]
    return differences.sum() * scale, low * scale, high * scale


def differences(outcomes: Sequence[Outcome], reference: str) -> str:
    """Compare each training with the reference of the same seed, division and search.

    Raises:
        RecipeError: If there is no such reference.
    """
    references = {
        (outcome.seed, outcome.fold, outcome.search): outcome
        for outcome in outcomes
        if outcome.name == reference
    }
    if not references:
        raise RecipeError(f"--reference {reference} is none of the configurations")
    rows = []
    for outcome in outcomes:
        other = references.get((outcome.seed, outcome.fold, outcome.search))
        if other is None or other is outcome:
            continue
        cells = [outcome.name, str(outcome.seed), outcome.fold, outcome.search]
        for name, errors in outcome.sets.items():
            difference, low, high = interval(errors, other.sets[name])
            cells.append(f"{difference:+.1f} ({low:+.1f} to {high:+.1f})")
        rows.append(cells)
    return grid(
        ["configuration", "seed", "division", "search", *outcomes[0].sets], rows
    )


def report(
    outcomes: Sequence[Outcome],
    title: str,
    reference: str | None = None,
    notes: str = "",
) -> str:
    """Return the comparison in Markdown.

    Args:
        outcomes: One or more.
        title: Of the whole.
        reference: The configuration that the others are compared with.
        notes: Added at the end.
    """
    facts = outcomes[0].facts
    commands = dict.fromkeys(outcome.command for outcome in outcomes)
    parts = [
        f"# {title}\n",
        f"{software_line(facts['versions'])}; {facts['epochs']} epochs each. "
        "The number of wrong words is in brackets; minutes are those of the epochs.\n",
        table(outcomes),
        "Each row's command:\n",
        "".join(f"    {command}\n" for command in commands),
    ]
    for heading, over in (("Seeds", "seed"), ("Divisions", "fold")):
        if rows := spread(outcomes, over):
            parts += [f"## {heading}\n", rows]
    if reference:
        parts += [
            f"## Against {reference}\n",
            "Difference of the word error rates in %, in brackets its 95 % interval by "
            "a paired bootstrap over utterances: where that holds 0, the set does not "
            "tell the two apart.\n",
            differences(outcomes, reference),
        ]
    if notes:
        parts.append(notes)
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--title", required=True)
    parser.add_argument("--experiments", type=Path, nargs="+", required=True)
    parser.add_argument("--reference", help="compare the others with this one")
    parser.add_argument("--notes", type=Path, help="Markdown, added at the end")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    try:
        notes = args.notes.read_text(encoding="utf-8") if args.notes else ""
        text = report(read(args.experiments), args.title, args.reference, notes)
        with replacing(args.output) as partial:
            partial.write_text(text, encoding="utf-8")
    except (RecipeError, OSError) as exc:
        print(f"compare.py: error: {exc}", file=sys.stderr)
        return 1
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

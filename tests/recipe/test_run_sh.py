"""egs/mini_an4/asr_transducer1/run.sh, with ESPnet's real commands on a tiny model."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

ROOT = Path(__file__).resolve().parents[2]
RUN_SH = ROOT / "egs" / "mini_an4" / "asr_transducer1" / "run.sh"
STAGES = ROOT / "egs/TEMPLATE/asr_transducer1/asr_transducer.sh"
EPOCH = re.compile(r"^  epoch (\d+)/6: loss ([\d.]+) on train", re.MULTILINE)


def run_sh(*arguments):
    return [str(RUN_SH), "--python", sys.executable, *map(str, arguments)]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def run(*arguments, cwd=None):
    return subprocess.run(
        run_sh(*arguments),
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        cwd=cwd,
    )


def test_help_names_every_option():
    result = run("--help")

    options = re.findall(r"^    (--[a-z_]+)\)", STAGES.read_text(), re.MULTILINE)
    assert result.returncode == 0
    assert len(options) > 5
    assert [option for option in options if f"  {option} " not in result.stdout] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stag", "3"], "unknown option '--stag' (--help lists the options)"),
        (["5"], "unknown option '5' (--help lists the options)"),
        (["--stop_stage"], "option --stop_stage needs a value"),
        (["--stage", "7"], "a stage is a number from 0 to 6, not '7'"),
        (["--stop_stage", "two"], "a stage is a number from 0 to 6, not 'two'"),
        (["--decode_configs", ""], "--decode_configs names no file"),
        (["--python", "no/such/python"], "no such Python: {cwd}/no/such/python"),
        (["--archive", "a.tar.gz"], "no such file: {cwd}/a.tar.gz"),
        (["--train_config", "t.yaml"], "no such file: {cwd}/t.yaml"),
        (["--token_type", "phn"], "--token_type is char, word or bpe, not 'phn'"),
        (["--nbpe", "many"], "a whole number is needed, not 'many'"),
        (["--stream_seconds", "1h"], "a whole number is needed, not '1h'"),
        (
            ["--decode_sets", "test", "--max_train_wer", "0"],
            "--max_train_wer: train is not decoded",
        ),
        (
            ["--pack", "/a/model.rar"],
            "--pack: a packed model ends in .zip, .tar, .tar.gz or .tgz, not "
            "'/a/model.rar'",
        ),
        (["--expdir", "a,b"], "ESPnet cannot take a comma in --datadir or --expdir"),
    ],
)
def test_says_in_one_line_what_is_wrong_with_an_option(tmp_path, arguments, message):
    result = run("--datadir", tmp_path / "data", *arguments, cwd=tmp_path)

    assert result.returncode == 1
    assert result.stderr == f"run.sh: error: {message.format(cwd=tmp_path)}\n"
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, archive):
    """A folder with tiny configurations, and run.sh's options for it."""
    folder = tmp_path_factory.mktemp("recipe")
    config = yaml.safe_load((ROOT / "conf/train_mini_an4_mega_bias.yaml").read_text())
    config["decoder_conf"] |= {"block_size": 16, "linear_size": 16, "num_blocks": 1}
    config |= {"num_iters_per_epoch": 4, "max_epoch": 6}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
    for search in ("default", "maes"):
        text = f"beam_size: 1\nbeam_search_config: {{search_type: {search}}}\n"
        (folder / f"{search}.yaml").write_text(text)
    options = [
        *("--archive", archive),
        *("--train_config", folder / "tiny.yaml"),
        *("--decode_configs", f"{folder}/default.yaml {folder}/maes.yaml"),
        *("--datadir", folder / "data"),
        *("--expdir", folder / "exp"),
    ]
    return folder, options


def processes_that_mention(text):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().decode(errors="replace")
        except OSError:  # ended meanwhile
            continue
        if text in command:
            found.append(command)
    return found


@pytest.fixture(scope="module")
def interrupted(tiny):
    """A run that Ctrl-C ended in epoch 3: its output, its status, and what it left."""
    folder, options = tiny
    process = subprocess.Popen(
        run_sh(*options),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        # pytest may itself run where Ctrl-C is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("  epoch 3/6: "):
            process.send_signal(signal.SIGINT)
    process.wait(60)
    left = processes_that_mention(str(folder / "exp"))
    return "".join(lines), process.returncode, left


@pytest.fixture(scope="module")
def resumed(tiny, interrupted):
    return run(*tiny[1])


@pytest.mark.slow
def test_an_interrupted_run_ends_its_children_and_says_so(interrupted):
    output, status, left = interrupted

    assert status == 130, output
    assert output.endswith("run.sh: interrupted; the same command goes on from here\n")
    assert [int(epoch) for epoch, _ in EPOCH.findall(output)][:3] == [1, 2, 3]
    assert "Stage 5" not in output
    assert left == []


@pytest.mark.slow
def test_the_training_goes_on_where_it_was(interrupted, resumed):
    before = [int(epoch) for epoch, _ in EPOCH.findall(interrupted[0])]
    after = [int(epoch) for epoch, _ in EPOCH.findall(resumed.stdout)]

    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    for number in (1, 2, 3):
        assert re.search(rf"Stage {number}: .*: finished earlier", resumed.stdout)
    assert "the training goes on from its checkpoint" in resumed.stdout
    assert after[-1] == 6
    assert after == list(range(after[0], 7))
    # an epoch is shown before it is saved, and a later one may have been saved unseen
    assert 3 <= before[-1] <= after[0] <= before[-1] + 2


@pytest.mark.slow
def test_the_results_are_there_and_shown(tiny, resumed):
    expdir = tiny[0] / "exp"
    results = (expdir / "RESULTS.md").read_text()

    rows = re.findall(r"^\| (default|maes) \| (\w+) \| (\d) \|", results, re.MULTILINE)
    counts = {"train": "4", "valid": "1", "test": "2"}
    assert rows == [(s, n, c) for s in ("default", "maes") for n, c in counts.items()]
    assert results in resumed.stdout
    facts = json.loads((expdir / "results.json").read_text())
    assert (facts["decoder"], facts["epochs"]) == ("mega_bias", 6)
    assert facts["searches"]["maes"]["sets"]["train"]["words"] == 11
    # what the optimizer had moments for: the front-end's mel filters are no parameters
    checkpoint = torch.load(expdir / "train" / "checkpoint.pth", weights_only=False)
    moments = checkpoint["optimizers"][0]["state"].values()
    assert facts["parameters"] == sum(state["exp_avg"].numel() for state in moments)
    sizes = {name: value.numel() for name, value in checkpoint["model"].items()}
    assert facts["decoder_parameters"] == sum(
        size
        for name, size in sizes.items()
        if name.startswith("decoder.") and not name.endswith("rel_pos_bias._pe")
    )
    for picture in ("loss", "bias"):
        path = expdir / "train" / "images" / f"{picture}.png"
        assert path.read_bytes().startswith(b"\x89PNG")
        assert str(path) in results


@pytest.mark.slow
def test_the_results_name_the_division_of_the_corpus(tiny, resumed):
    folder, options = tiny
    expdir = folder / "one_division"
    shutil.copytree(folder / "exp", expdir)
    (folder / "data" / "half").symlink_to(folder / "data")
    division = ("--fold", "half", "--prepare_options", "--part half")

    result = run(*options, "--expdir", expdir, "--stage", 6, *division)

    assert result.returncode == 0, result.stdout + result.stderr
    expected = {"name": "half", "options": "--part half"}
    assert json.loads((expdir / "results.json").read_text())["fold"] == expected
    assert "fold" not in json.loads((folder / "exp" / "results.json").read_text())


@pytest.mark.slow
def test_the_search_benchmark_decodes_with_the_model(tiny, resumed):
    folder, _ = tiny
    (model,) = (folder / "exp").rglob("latest.pth")
    script = ROOT / "benchmarks" / "bench_search.py"
    options = ["--train", model.parent, "--wav_scp", folder / "exp/default/wav.scp"]

    printed = subprocess.check_output(
        [sys.executable, script, "--smoke", *options], text=True, env=environment()
    )

    for search in ("default", "maes"):
        assert f"| {search}, decoder alone, ms | " in printed


def test_tokens_come_from_the_training_text_and_blank_is_first(tiny, resumed):
    datadir = tiny[0] / "data"
    tokens = (datadir / "token_list/char/tokens.txt").read_text().splitlines()

    said = (datadir / "train" / "text").read_text().splitlines()
    letters = set("".join(line.partition(" ")[2] for line in said))
    assert tokens[:2] == ["<blank>", "<unk>"]
    assert tokens[-1] == "<sos/eos>"
    assert set(tokens[2:-1]) == (letters - {" "}) | {"<space>"}
    assert "B" not in tokens  # only in OCTOBER, which is in the test set


@pytest.mark.slow
def test_a_finished_stage_is_not_run_again(tiny, resumed):
    folder, options = tiny

    def snapshot():
        files = (path for path in folder.rglob("*") if path.is_file())
        return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}

    before = snapshot()
    again = run(*options)

    assert again.returncode == 0, again.stderr
    assert len(re.findall("finished earlier", again.stdout)) == 7
    assert (folder / "exp" / "RESULTS.md").read_text() in again.stdout
    assert snapshot() == before


@pytest.mark.slow
def test_only_what_depends_on_a_changed_file_is_run_again(tiny, resumed):
    folder, options = tiny
    text = "# again\n" + (folder / "maes.yaml").read_text()
    (folder / "maes.yaml").write_text(text)

    again = run(*options)

    assert again.returncode == 0, again.stderr
    assert "Stage 4: training: finished earlier" in again.stdout
    assert "Stage 5: decoding, default: finished earlier" in again.stdout
    assert re.search(r"Stage 5: decoding, maes\n(?:  .*\n)+  done", again.stdout)
    assert "  fash-an253-b: " in again.stdout


@pytest.mark.slow
def test_damaged_audio_is_prepared_again_and_the_training_stands(tiny, resumed):
    folder, options = tiny
    first = (folder / "data" / "train" / "wav.scp").read_text().split()[1]
    whole = Path(first).read_bytes()
    Path(first).write_bytes(whole[:-2])

    again = run(*options)

    assert again.returncode == 0, again.stderr
    assert re.search(r"Stage 1: data\n(?:  .*\n)+  done", again.stdout)
    assert Path(first).read_bytes() == whole
    for stage in ("3: statistics", "4: training", "5: decoding, default"):
        assert f"Stage {stage}: finished earlier" in again.stdout


@pytest.mark.slow
def test_other_audio_under_the_same_names_is_trained_on_elsewhere(tiny, resumed):
    folder, options = tiny
    content = folder / "data" / ".stamps" / "content"
    claim = folder / "exp" / ".stamps" / "claim"
    earlier = claim.read_text()
    claimed = json.loads(earlier)
    claimed["inputs"][str(content)] = "of other audio"
    claim.write_text(json.dumps(claimed))

    result = run(*options)
    claim.write_text(earlier)

    assert result.returncode == 1
    assert f"a training that was begun with another {content};" in result.stderr


@pytest.mark.slow
def test_a_limit_that_was_not_reached_fails(tiny, resumed):
    result = run(*tiny[1], "--stage", 6, "--max_train_wer", 0)

    assert result.returncode == 1
    assert "error: the training set was not learnt: WER " in result.stderr


@pytest.mark.slow
def test_another_configuration_is_refused_in_the_same_directory(tiny, resumed):
    folder, options = tiny
    config = folder / "other.yaml"
    config.write_text("# other\n" + (folder / "tiny.yaml").read_text())
    checkpoint = folder / "exp" / "train" / "checkpoint.pth"
    before = checkpoint.stat()

    result = run(*options, "--train_config", config)

    assert result.returncode == 1
    assert f"{folder}/exp/train holds a training that was begun with another" in (
        result.stderr
    )
    assert str(config) in result.stderr
    assert "Stage 3" not in result.stdout
    after = checkpoint.stat()
    # It may be read, at another second.
    assert (after.st_ino, after.st_ctime_ns) == (before.st_ino, before.st_ctime_ns)


@pytest.mark.slow
def test_a_broken_checkpoint_is_set_aside_and_the_training_begins_anew(tiny, resumed):
    folder, options = tiny
    checkpoint = folder / "exp" / "train" / "checkpoint.pth"
    checkpoint.write_bytes(checkpoint.read_bytes()[:5000])
    (folder / "exp" / ".stamps" / "train").unlink()

    result = run(*options, "--stage", 4, "--stop_stage", 4)

    assert result.returncode == 0, result.stderr
    aside = folder / "exp" / "train.broken1"
    assert (
        f"{checkpoint} is broken; what there was of the training is now in {aside}"
        in (result.stdout)
    )
    assert [int(epoch) for epoch, _ in EPOCH.findall(result.stdout)] == [*range(1, 7)]
    assert (aside / "checkpoint.pth").stat().st_size == 5000


@pytest.mark.slow
def test_a_misspelt_key_stops_the_run_before_the_statistics(tiny, resumed):
    folder, options = tiny
    config = folder / "misspelt.yaml"
    config.write_text(
        (folder / "tiny.yaml").read_text().replace("qk_size:", "qk_sise:")
    )

    result = run(*options, "--train_config", config, "--expdir", folder / "misspelt")

    assert result.returncode == 1
    assert result.stderr == (
        f"check.py: error: {config}: decoder_conf: mega_bias has no key 'qk_sise'; "
        "did you mean qk_size?\n"
    )
    files = [path for path in (folder / "misspelt").rglob("*") if path.is_file()]
    assert files == [folder / "misspelt" / ".stamps" / "claim"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "name", "conf"),
    [
        ("normalize: utterance_mvn  # means", "utterance_mvn", {}),
        ("normalize:  # by nothing", None, {}),
        (
            "normalize: global_mvn\nnormalize_conf: {norm_vars: false}",
            "global_mvn",
            {"norm_vars": False, "stats_file": "stats/train/feats_stats.npz"},
        ),
    ],
    ids=["utterance_mvn", "none", "global_mvn"],
)
def test_a_configuration_may_name_its_normalisation(tiny, resumed, lines, name, conf):
    folder, options = tiny
    config, expdir = folder / f"{name}.yaml", folder / f"normalised_by_{name}"
    text = (folder / "tiny.yaml").read_text().replace("max_epoch: 6", "max_epoch: 1")
    config.write_text(f"{text}{lines}\n")

    result = run(
        *(*options, "--train_config", config, "--expdir", expdir, "--stop_stage", 4)
    )

    assert result.returncode == 0, result.stdout + result.stderr
    facts = yaml.safe_load((expdir / "train" / "config.yaml").read_text())
    assert facts["normalize"] == name
    if "stats_file" in conf:
        conf = {**conf, "stats_file": str(expdir / conf["stats_file"])}
    assert facts["normalize_conf"] == conf


@pytest.mark.slow
def test_without_a_word_on_it_the_training_sets_statistics_normalise(tiny, resumed):
    folder, _ = tiny

    facts = yaml.safe_load((folder / "exp" / "train" / "config.yaml").read_text())

    assert facts["normalize"] == "global_mvn"
    stats_file = str(folder / "exp" / "stats" / "train" / "feats_stats.npz")
    assert facts["normalize_conf"] == {"stats_file": stats_file}

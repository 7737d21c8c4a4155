"""recipe.normalization: what ESPnet is told, by what the training YAML says."""

import pytest

BY_STATISTICS = ["--normalize", "global_mvn", "--normalize_conf", "stats_file=s.npz"]


@pytest.fixture
def normalization(local):
    return local("normalization")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_epoch: 1\n", BY_STATISTICS),
        ("# normalize: utterance_mvn\nmax_epoch: 1\n", BY_STATISTICS),
        ("", BY_STATISTICS),
        ("normalize: global_mvn\n", BY_STATISTICS),
        ("normalize: Global_MVN\n", BY_STATISTICS),
        ("normalize: global_mvn\nnormalize_conf: {norm_vars: false}\n", BY_STATISTICS),
        (
            "normalize: global_mvn\nnormalize_conf:\n    stats_file: mine.npz\n",
            BY_STATISTICS[:2],
        ),
        ("model_conf: {stats_file: x}\n", BY_STATISTICS),
        ("normalize: utterance_mvn\n", []),
        ('"normalize": utterance_mvn\n', []),
        ("  normalize: utterance_mvn\n  max_epoch: 1\n", []),
        ("{max_epoch: 1, normalize: utterance_mvn}\n", []),
        ("normalize: null\n", []),
        ("normalize:\n", []),
        ("normalize: none\n", []),
        ("frontend_conf:\n    normalize: utterance_mvn\n", BY_STATISTICS),
    ],
)
def test_leaves_to_the_yaml_what_it_says(normalization, tmp_path, text, expected):
    config = tmp_path / "train.yaml"
    config.write_text(text)

    assert normalization.options(config, "s.npz") == expected


def test_names_the_file_that_is_no_yaml(run_tool, tmp_path):
    config = tmp_path / "train.yaml"
    config.write_text("decoder: mega_bias\n  decoder_conf: {\n")

    result = run_tool("normalization", "--config", config, "--stats_file", "s.npz")

    assert result.returncode == 1
    assert result.stdout == ""
    message = f"normalization.py: error: {config} is no YAML: "
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1

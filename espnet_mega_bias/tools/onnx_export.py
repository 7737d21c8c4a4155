"""A trained model as ONNX graphs, with a decoder that needs onnxruntime alone."""

import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from espnet_mega_bias.tools.error import ToolError
from espnet_mega_bias.tools.experiment import Experiment
from espnet_mega_bias.tools.output import new_directory
from espnet_mega_bias.tools.quiet import quiet_imports, quiet_logs

if TYPE_CHECKING:
    import torch

GRAPHS = ("encoder", "decoder_step", "joint")
TOKEN_TYPES = ("bpe", "char", "phn", "word")

# Largest difference from PyTorch, as a share of the largest value of an output, with
# which an export is kept. Rounding makes a few 1e-6 of trained models, and 1e-4 of some
# with random weights.
TOLERANCE = 1e-3

# Most frames that an encoder may need before it gives its first output.
_MOST_FRAMES = 1000

# Positions that the graph of the decoder is compared over.
_LENGTHS = (12, 40)


@dataclass(frozen=True)
class Report:
    """What an export found out.

    Args:
        differences: By graph, the largest difference from PyTorch, as a share of the
            largest value.
        int8_differences: The same with int8 weights (empty = not asked for).
        sizes: By graph, size of the file that was kept, in bytes.
        remarks: What the user should know.

    """

    differences: dict[str, float]
    int8_differences: dict[str, float]
    sizes: dict[str, int]
    remarks: list[str]


def export(experiment: Experiment, directory: Path, int8: bool = False) -> Report:
    """Write a model as ONNX graphs, and compare them with PyTorch.

    Args:
        experiment: Trained model with the decoder `mega_bias`, or with ESPnet's `mega`,
            whose weights `mega_bias` takes over.
        directory: Directory to be made: encoder.onnx, decoder_step.onnx, joint.onnx,
            tokens.txt, model.json and decode.py. It appears when all is well.
        int8: Store the weights of matrix products as 8-bit integers.

    Returns:
        : What was found out.

    Raises:
        ToolError: If the model is of another kind, a package is missing, `directory`
            exists, or a graph does not compute what PyTorch does.

    """
    for package in ("onnx", "onnxruntime", "onnxscript"):
        _check_is_there(package)

    with quiet_imports():
        from espnet_mega_bias.tools.onnx_graphs import DecoderStep, Encoder, Joint

    decoder = experiment.config.get("decoder")
    if decoder not in ("mega", "mega_bias"):
        raise ToolError(
            f"{experiment.config_file}: the decoder is {decoder!r}, not mega or "
            "mega_bias: only those can be exported"
        )

    token_type = experiment.config.get("token_type")
    if token_type not in TOKEN_TYPES:
        raise ToolError(
            f"{experiment.config_file}: token_type must be one of "
            f"{', '.join(TOKEN_TYPES)}, got {token_type!r}"
        )

    with new_directory(directory) as partial:
        model = dataclasses.replace(
            experiment, config={**experiment.config, "decoder": "mega_bias"}
        ).build_model()
        remarks = _remarks(experiment, model)
        # As ESPnet's Speech2Text does.
        model.encoder.dynamic_chunk_training = False

        encoder, step = Encoder(model), DecoderStep(model.decoder)
        joint = Joint(model.joint_network)
        speech = _speech(experiment, model)

        write_encoder(encoder, speech, partial / "encoder.onnx")
        write_decoder_step(step, partial / "decoder_step.onnx")
        write_joint(joint, partial / "joint.onnx")

        def compare() -> dict[str, float]:
            return {
                "encoder": _largest_difference(
                    partial / "encoder.onnx", _compare_encoder, model, speech
                ),
                "decoder_step": _largest_difference(
                    partial / "decoder_step.onnx", _compare_decoder, model.decoder, step
                ),
                "joint": _largest_difference(
                    partial / "joint.onnx", _compare_joint, joint
                ),
            }

        differences = compare()
        for name, difference in differences.items():
            if not difference <= TOLERANCE:
                raise ToolError(
                    f"the {name} graph differs from PyTorch by {difference:.1e} of the "
                    f"largest value, more than {TOLERANCE:.0e}: nothing is kept"
                )

        int8_differences = {}
        if int8:
            for name in GRAPHS:
                _quantize(partial / f"{name}.onnx")
            int8_differences = compare()

        description = _description(experiment, speech, step, int8)
        (partial / "model.json").write_text(json.dumps(description, indent=2) + "\n")
        (partial / "tokens.txt").write_text(
            "".join(f"{token}\n" for token in experiment.tokens), encoding="utf-8"
        )
        shutil.copyfile(
            Path(__file__).with_name("onnx_decoder.py"), partial / "decode.py"
        )
        sizes = {name: (partial / f"{name}.onnx").stat().st_size for name in GRAPHS}

    return Report(differences, int8_differences, sizes, remarks)


def _check_is_there(package: str) -> None:
    try:
        with quiet_imports():
            importlib.import_module(package)
    except ImportError as exc:
        raise ToolError(
            f"{package} is missing: pip install 'espnet-mega-bias[export]'"
        ) from exc


def _remarks(experiment: Experiment, model: "torch.nn.Module") -> list[str]:
    remarks = []

    if experiment.config["decoder"] == "mega":
        remarks.append(
            "trained with ESPnet's mega, exported as mega_bias with the same weights: "
            "it computes in the search what was trained, which ESPnet's own does not "
            "(docs/differences.md), so that scores, and some results, differ"
        )

    if model.encoder.dynamic_chunk_training:
        remarks.append(
            "trained with dynamic_chunk_training, exported with full context, as "
            "ESPnet decodes without --streaming"
        )

    return remarks


def write_encoder(
    encoder: "torch.nn.Module", speech: dict[str, Any], path: Path
) -> None:
    """Write the encoder.

    Args:
        encoder: `onnx_graphs.Encoder`.
        speech: What it takes, as in model.json.
        path: File.

    """
    _write(
        encoder,
        {"speech": next(_utterances(speech, [1.0]))},
        {"speech": {1: "samples" if speech["kind"] == "audio" else "frames"}},
        ["encoder"],
        path,
    )


def write_decoder_step(step: "torch.nn.Module", path: Path) -> None:
    """Write the step of the decoder.

    Args:
        step: `onnx_graphs.DecoderStep`.
        path: File.

    """
    import torch

    state = step.init_state()
    # Sizes that nothing else has, so that none is taken for another.
    batch, history = 3, 5
    rows = {
        name: torch.zeros(len(state[name]), batch, history, state[name].size(-1))
        for name in ("keys", "values")
    }

    _write(
        step,
        {
            "labels": torch.ones(batch, dtype=torch.int64),
            "length": torch.full((batch,), history),
            "ema": state["ema"].repeat_interleave(batch, dim=1),
            **rows,
            "positions": torch.arange(history).repeat(batch, 1),
        },
        {
            "labels": {0: "batch"},
            "length": {0: "batch"},
            "ema": {1: "batch"},
            "keys": {1: "batch", 2: "history"},
            "values": {1: "batch", 2: "history"},
            "positions": {0: "batch", 1: "history"},
        },
        ["decoder", "next_ema", "new_keys", "new_values", "new_positions"],
        path,
    )


def write_joint(joint: "torch.nn.Module", path: Path) -> None:
    """Write the joint network.

    Args:
        joint: `onnx_graphs.Joint`.
        path: File.

    """
    _write(
        joint,
        _joint_inputs(joint, 4, 3),
        {"encoder": {0: "frames"}, "decoder": {0: "batch"}},
        ["log_probs"],
        path,
    )


def _write(
    module: "torch.nn.Module",
    inputs: "dict[str, torch.Tensor]",
    axes: dict[str, dict[int, str]],
    outputs: list[str],
    path: Path,
) -> None:
    """Trace a module and write it as an ONNX graph.

    Args:
        module: Module.
        inputs: Example of its inputs.
        axes: By input, names of the axes whose length may change.
        outputs: Names of its outputs.
        path: File.

    """
    import torch

    # The exporter's remarks on itself.
    with quiet_imports(), quiet_logs(logging.ERROR), torch.no_grad():
        try:
            program = torch.onnx.export(
                module.eval(),
                tuple(inputs.values()),
                input_names=list(inputs),
                output_names=outputs,
                dynamic_shapes=tuple(axes[name] for name in inputs),
                dynamo=True,
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as exc:
            reason = exc.__cause__ or exc
            raise ToolError(
                f"torch.onnx cannot export the {path.stem}: {type(reason).__name__}: "
                f"{reason}"
            ) from exc

        # Each node says which lines of which files of this machine it came from.
        for node in program.model.graph:
            node.metadata_props.clear()

        program.save(path, external_data=False)


def _quantize(path: Path) -> None:
    """Store the weights of matrix products as 8-bit integers, in place.

    Not those of the mel filters, whose small values would be lost.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    kept = [
        node.name
        for node in onnx.load(path).graph.node
        if any("melmat" in name for name in node.input)
    ]
    whole = path.with_name(f"float32.{path.name}")
    path.rename(whole)

    with quiet_imports(), quiet_logs(logging.ERROR):
        quantize_dynamic(
            whole,
            path,
            op_types_to_quantize=["MatMul"],
            nodes_to_exclude=kept,
            per_channel=True,
            # Processors without VNNI add up pairs of products in 16 bits.
            reduce_range=True,
            weight_type=QuantType.QInt8,
        )

    whole.unlink()


Pairs = Iterator[tuple["torch.Tensor", "torch.Tensor"]]


def _largest_difference(
    path: Path, compare: Callable[..., Pairs], *arguments: Any
) -> float:
    """Compare a graph with PyTorch.

    Args:
        path: File of the graph.
        compare: Function that runs both, and gives the outputs of the graph beside
            those of PyTorch.
        *arguments: Its arguments after the onnxruntime session.

    Returns:
        : Largest difference, as a share of the largest value of the output.

    """
    import onnxruntime
    import torch

    try:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

        with torch.no_grad():
            shares = [
                (actual - expected).abs().max() / expected.abs().max()
                for actual, expected in compare(session, *arguments)
            ]

        # Unlike Python's, torch's maximum is NaN where one of them is.
        return torch.stack(shares).max().item()
    except Exception as exc:  # onnxruntime's have nothing in common
        raise ToolError(f"the {path.stem} graph does not run: {exc}") from exc


def _compare_encoder(
    session: Any, model: "torch.nn.Module", speech: dict[str, Any]
) -> Pairs:
    import torch

    for utterance in _utterances(speech, [0.7, 2.3]):
        (encoded,) = session.run(None, {"speech": utterance.numpy()})

        # ESPnet's normalisation works in place.
        features, lengths = model._extract_feats(
            utterance.clone(), torch.tensor([utterance.size(1)])
        )
        if model.normalize is not None:
            features, lengths = model.normalize(features, lengths)

        yield torch.from_numpy(encoded), model.encoder(features, lengths)[0]


def _compare_decoder(
    session: Any, decoder: "torch.nn.Module", step: "torch.nn.Module"
) -> Pairs:
    import numpy as np
    import torch

    generator = torch.Generator().manual_seed(0)

    for length in _LENGTHS:
        after = torch.randint(decoder.vocab_size, (length - 1,), generator=generator)
        labels = [0, *after.tolist()]
        state = decoder.init_state()
        fed = {name: tensor.numpy() for name, tensor in step.init_state().items()}

        for end in range(1, length + 1):
            expected, state = decoder.score(labels[:end], state)
            out, fed["ema"], keys, values, positions = session.run(
                None, {"labels": np.array([labels[end - 1]]), **fed}
            )
            fed["length"] = fed["length"] + 1
            fed["keys"] = np.concatenate([fed["keys"], keys], axis=2)
            fed["values"] = np.concatenate([fed["values"], values], axis=2)
            fed["positions"] = np.concatenate([fed["positions"], positions], axis=1)

            yield torch.from_numpy(out), expected


def _compare_joint(session: Any, joint: "torch.nn.Module") -> Pairs:
    import torch

    for counts in ((1, 1), (6, 4)):
        inputs = _joint_inputs(joint, *counts)
        (log_probs,) = session.run(None, {k: x.numpy() for k, x in inputs.items()})

        yield torch.from_numpy(log_probs), joint(**inputs)


def _joint_inputs(
    joint: "torch.nn.Module", frames: int, batch: int
) -> "dict[str, torch.Tensor]":
    """Make random inputs of the joint network."""
    import torch

    generator = torch.Generator().manual_seed(0)
    network = joint.joint_network

    return {
        "encoder": torch.randn(
            frames, network.lin_enc.in_features, generator=generator
        ),
        "decoder": torch.randn(batch, network.lin_dec.in_features, generator=generator),
    }


def _utterances(
    speech: dict[str, Any], seconds: list[float]
) -> "Iterator[torch.Tensor]":
    """Make random utterances of about these lengths (100 frames a second)."""
    import torch

    generator = torch.Generator().manual_seed(0)

    for duration in seconds:
        if speech["kind"] == "audio":
            length = speech["shortest"] + int(duration * speech["sample_rate"])
            yield 0.1 * torch.randn(1, length, generator=generator)
        else:
            length = speech["shortest"] + int(100 * duration)
            yield torch.randn(1, length, speech["size"], generator=generator)


def _speech(experiment: Experiment, model: "torch.nn.Module") -> dict[str, Any]:
    """Say what the encoder takes."""
    if model.frontend is None:
        size = experiment.config["input_size"]

        return {
            "kind": "features",
            "size": size,
            "shortest": _fewest_frames(model.encoder, size),
        }

    stft = model.frontend.stft
    frames = _fewest_frames(model.encoder, model.frontend.output_size())
    samples = (frames - 1) * stft.hop_length

    return {
        "kind": "audio",
        "sample_rate": int(model.frontend.logmel.mel_options["sr"]),
        # Half a window is reflected at both ends, and must be shorter than the rest.
        "shortest": max(samples, stft.n_fft // 2 + 1)
        if stft.center
        else samples + stft.n_fft,
        # ESPnet's command scales each file to this maximum.
        "volume": experiment.config.get("speech_volume_normalize"),
    }


def _fewest_frames(encoder: "torch.nn.Module", size: int) -> int:
    """Find the shortest input that the encoder has an output for."""
    import torch

    for frames in range(1, _MOST_FRAMES + 1):
        # ESPnet's TooShortUttError, or what the first layer that lacks frames raises.
        with contextlib.suppress(Exception), torch.no_grad():
            features, length = torch.zeros(1, frames, size), torch.tensor([frames])

            if encoder(features, length)[0].size(1) > 0:
                return frames

    raise ToolError(f"the encoder has no output for {_MOST_FRAMES} frames")


def _description(
    experiment: Experiment,
    speech: dict[str, Any],
    step: "torch.nn.Module",
    int8: bool,
) -> dict[str, Any]:
    """Say what a program that runs the graphs has to know."""
    config, state = experiment.config, step.init_state()

    return {
        "speech": speech,
        "labels": {"count": len(experiment.tokens), "blank": 0},
        "tokens": {"type": config["token_type"]},
        "state": {
            "ema": list(state["ema"].shape),
            "keys": list(state["keys"].shape),
            "values": list(state["values"].shape),
            "history": step.history,
        },
        "weights": "int8" if int8 else "float32",
        "exported_from": {
            "checkpoint": str(experiment.checkpoint),
            "config": str(experiment.config_file),
            "decoder": config["decoder"],
        },
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("espnet-mega-bias", "espnet", "torch", "onnx", "onnxruntime")
        },
    }

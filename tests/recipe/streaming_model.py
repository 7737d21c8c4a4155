"""A tiny transducer with random weights that can be streamed."""

import torch
from espnet2.tasks.asr_transducer import ASRTransducerTask

import espnet_mega_bias

TOKENS = ["<blank>", "<unk>", *"abcde", "<space>", "<sos/eos>"]
DECODER = {
    "rel_pos_bias_type": "rotary",
    "block_size": 8,
    "linear_size": 8,
    "qk_size": 4,
    "v_size": 32,
    "num_blocks": 1,
    "max_positions": None,
}


def build(
    frontend_conf=(), input_conf=(), main_conf=(), decoder_conf=(), input_size=None
):
    """Return ESPnet's options and the model."""
    espnet_mega_bias.register()
    args = ASRTransducerTask.get_parser().parse_args(
        ["--output_dir", "unused", "--token_list", "unused", "--token_type", "char"]
    )
    args.token_list = TOKENS
    args.frontend_conf = {"n_mels": 16, **dict(frontend_conf)}
    args.input_size = input_size
    args.encoder_conf = {
        "main_conf": {"dynamic_chunk_training": True, **dict(main_conf)},
        "input_conf": {"vgg_like": True, "conv_size": 2, **dict(input_conf)},
        "body_conf": [
            {
                "block_type": "conformer",
                "num_blocks": 1,
                "hidden_size": 8,
                "linear_size": 8,
                "heads": 2,
                "conv_mod_kernel_size": 3,
            }
        ],
    }
    args.decoder, args.decoder_conf = "mega_bias", {**DECODER, **dict(decoder_conf)}
    args.normalize = None
    model = ASRTransducerTask.build_model(args).eval()
    joint = model.joint_network
    with torch.no_grad():
        for parameter in (*joint.parameters(), *model.decoder.parameters()):
            parameter.normal_()
        model.decoder.embed.weight[0] = 0.0
        # labels that depend on the audio, and an end to each frame
        joint.lin_enc.weight *= 30.0
        joint.lin_out.weight *= 2.0
        joint.lin_out.bias.zero_()
        joint.lin_out.bias[0] = 2.0
    return args, model

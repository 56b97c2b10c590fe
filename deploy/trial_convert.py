"""Turn the trial model's GGUF into safetensors, a tokenizer and a chat template.

A program of its own, ``python -m deploy.trial_convert GGUF OUT``, so that the memory that loading
takes goes back to the system. It prints one line for each of ``STEPS`` as that step ends.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

STEPS = ("libraries", "tokenizer", "weights", "checkpoint")


def convert(gguf: Path, out: Path) -> None:
    """Write the checkpoint in ``gguf`` to the folder ``out``, in bf16.

    bf16 because the trial computes in it: half the bytes to load of fp32. The 4-bit weights don't
    all fit bf16 exactly, so what the product serves, and compares itself with, is this checkpoint.
    """
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    _tell("libraries")

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file names its splitting rule ("smollm": each digit alone, then the bytes), which the
    # reader of GGUF files drops; without it the model meets numbers that it was never trained on.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    _tell("tokenizer")

    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    model.to(torch.bfloat16)
    tokenizer.model_max_length = model.config.max_position_embeddings
    _tell("weights")

    # Loading leaves the traces of a quantised model behind, and those refuse to be saved.
    model.hf_quantizer = None
    model.is_quantized = False
    model.quantization_method = None
    del model.config.quantization_config
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    _tell("checkpoint")


def _tell(step: str) -> None:
    sys.stdout.write(f"{step}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))

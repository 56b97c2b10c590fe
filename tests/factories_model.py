"""A tiny random-weight Llama checkpoint with its tokenizer, made in code, for tests end to end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from pathlib import Path

VOCAB_SIZE = 512
"""Rows of the embedding, and exactly the number of the tokenizer's tokens."""
MAX_POSITIONS = 1024
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
BOS_ID, EOS_ID = 1, 2

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = """
Every morning the harbour master walked along the quiet pier and counted the boats that had come
home during the night. Some carried fish, others carried stones for the new bridge, and one small
vessel always brought letters from the island. The children waited for that boat because the
captain told them stories about whales, lanterns, forgotten maps and mountains made of glass.
What is the capital of a country that exists only in winter? Nobody could answer the question, yet
everybody had an opinion, and the discussion usually lasted until the bells rang for supper. The
teacher wrote numbers on the board: one, two, three, seven, eleven, and asked which of them was
lonely. Later the engineers measured the current under the bridge, compared it with the current of
last year, and reported that the water was moving faster. The answer was simple: please continue,
write a short summary, explain the result, and thank the people who helped with the measurements.
"""


def write_tiny_llama(
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    num_layers: int = 2,
    max_positions: int = MAX_POSITIONS,
    head_dim: int = 16,
) -> Path:
    """Write config, safetensors weights and tokenizer into ``folder``; same seed, same bytes.

    Layers are random enough that greedy outputs differ from prompt to prompt, and the head is
    scaled so that the two best tokens are rarely close.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128,
        num_hidden_layers=num_layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=head_dim, max_position_embeddings=max_positions, initializer_range=0.2,
        tie_word_embeddings=False, bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    model.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID)
    model.to(dtype).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with ``VOCAB_SIZE`` tokens and a chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_CORPUS.split("\n"), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=TURN_START,
        eos_token=TURN_END,
        unk_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer

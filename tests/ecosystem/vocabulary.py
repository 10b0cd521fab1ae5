"""A tokenizer of words w0 ... w95, made here: nothing is downloaded."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<mask>", "<sep>", "<cls>")
SIZE = 96


def tokenizer(*more: str, pairs: bool = False) -> PreTrainedTokenizerFast:
    """Words are split at spaces; word w9 has the number 9, and the first numbers are the special tokens'.

    Args:
        more: further special tokens, with numbers from 96.
        pairs: frames texts with <cls> and <sep>, as BERT does.
    """
    words = {word: number for number, word in enumerate(SPECIAL)}
    words |= {f"w{number}": number for number in range(len(SPECIAL), SIZE)}
    words |= {word: SIZE + number for number, word in enumerate(more)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if pairs:
        frame = [("<cls>", words["<cls>"]), ("<sep>", words["<sep>"])]
        made.post_processor = processors.TemplateProcessing("<cls> $A <sep>", "<cls> $A <sep> $B:1 <sep>:1", frame)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        mask_token="<mask>", sep_token="<sep>", cls_token="<cls>", additional_special_tokens=list(more),
        padding_side="left" if not pairs else "right", model_max_length=64)

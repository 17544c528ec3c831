"""The batch: (3, 12) ids of which 12, 7 and 4 are kept, padded on the right, on the left, or with holes."""

import inspect

import torch

from .cases import CROSS
from .configs import EOS, HIDDEN, SPECIAL, VOCABULARY

BATCH, LENGTH, LENGTHS = 3, 12, (12, 7, 4)
WITH_TOKEN_LABELS = {
    CROSS,
    "AutoModelForCausalLM",
    "AutoModelForMultimodalLM",
    "AutoModelForMaskedLM",
    "AutoModelForSeq2SeqLM",
}
HEADS_OF_PAIRS = {"AutoModelForSequenceClassification", "AutoModelForQuestionAnswering"}
PADDINGS = ("right", "left", "holes")


def keep_of(padding):
    """What is kept, (B, L)."""
    right = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
    if padding == "right":
        return right
    if padding == "left":
        return right.flip(1)
    holes = torch.zeros_like(right)
    for row, length in enumerate(LENGTHS):
        generator = torch.Generator().manual_seed(row)
        # Each row keeps its first token, which heads read; where else the holes lie is drawn.
        others = torch.randperm(LENGTH - 1, generator=generator)[: length - 1] + 1
        holes[row, torch.cat([torch.zeros(1, dtype=torch.long), others])] = True
    return holes


def encoder_keep(keep):
    """What an encoder keeps, where `keep` is the decoder's: the same lengths, of other rows."""
    return keep.flip(0)


def ids_of(config, keep, seed=0):
    """Random tokens, each sequence with its end, which some heads look for."""
    pad = getattr(config.get_text_config(), "pad_token_id", None)
    ids = torch.randint(SPECIAL, VOCABULARY - 4, keep.shape, generator=torch.Generator().manual_seed(seed))
    ids[torch.arange(BATCH), LENGTH - 1 - keep.flip(1).long().argmax(1)] = EOS
    return ids.masked_fill(~keep, pad if isinstance(pad, int) else 0)


def inputs(model, case, keep, *, image=False):
    """What the model is called with; an image, where it gives nothing without one."""
    parameters = inspect.signature(type(model).forward).parameters
    config = model.config
    generator = torch.Generator().manual_seed(2)
    ids = ids_of(config, keep)
    given = {"input_ids": ids, "attention_mask": keep.long(), **_labels(case, ids, keep)}
    if config.is_encoder_decoder and case.auto in {"AutoModel", *WITH_TOKEN_LABELS}:
        # Padded to the same length, so that no shape says which mask belongs to which sequence.
        seen = encoder_keep(keep)
        given.update(input_ids=ids_of(config, seen, seed=1), attention_mask=seen.long())
        if "decoder_input_ids" in parameters and case.auto == "AutoModel":
            given["decoder_input_ids"] = ids
        if "decoder_attention_mask" in parameters:
            given["decoder_attention_mask"] = keep.long()
    if config.is_encoder_decoder and case.auto in HEADS_OF_PAIRS:
        # The decoder's tokens are those of the encoder, shifted, and it has no mask.
        seen = encoder_keep(keep)
        given.update(input_ids=ids_of(config, seen, seed=1), attention_mask=seen.long())
    if case.auto == CROSS:
        encoded = torch.randn(*keep.shape, HIDDEN, generator=generator, dtype=model.dtype)
        given.update(encoder_hidden_states=encoded, encoder_attention_mask=encoder_keep(keep).long())
    if "bbox" in parameters:
        corner = torch.randint(0, 30, (*keep.shape, 2), generator=generator)
        given["bbox"] = torch.cat([corner, corner + torch.randint(1, 20, corner.shape, generator=generator)], -1)
    if "global_attention_mask" in parameters:
        given["global_attention_mask"] = torch.zeros_like(ids).index_fill_(1, torch.tensor([0]), 1)
    if image and "pixel_values" in parameters:
        given["pixel_values"] = _pixels(getattr(config, "vision_config", None) or config, model.dtype)
        if "image_attention_mask" in parameters:
            # Some take several images, and a flag for each token and image.
            given["pixel_values"] = given["pixel_values"][:, None]
            given["image_attention_mask"] = torch.ones(*keep.shape, 1, dtype=torch.long)
    if image and "input_features" in parameters:
        given["input_features"] = torch.randn(BATCH, 1, 32, 16, generator=generator, dtype=model.dtype)
    if image and "qformer_input_ids" in parameters:
        given.update(qformer_input_ids=ids, qformer_attention_mask=keep.long())
    return given


def _pixels(vision, dtype):
    size = getattr(vision, "image_size", 32)
    size = size if isinstance(size, int) else size[0]
    generator = torch.Generator().manual_seed(1)
    frames = [vision.num_frames] if hasattr(vision, "num_frames") else []
    shape = (BATCH, *frames, getattr(vision, "num_channels", 3), size, size)
    return torch.randn(shape, generator=generator, dtype=dtype)


def _labels(case, ids, keep):
    if case.auto in WITH_TOKEN_LABELS:
        return {"labels": ids.masked_fill(~keep, -100)}
    if case.auto == "AutoModelForTokenClassification":
        return {"labels": (ids % 2).masked_fill(~keep, -100)}
    if case.auto == "AutoModelForSequenceClassification":
        return {"labels": torch.arange(BATCH) % 2}
    if case.auto == "AutoModelForQuestionAnswering":
        positions = keep.long().argmax(1)
        return {"start_positions": positions, "end_positions": positions}
    return {}

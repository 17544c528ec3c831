"""The batch: (3, 12) ids of which 12, 7 and 4 are kept, padded on the right, on the left, or with holes."""

import inspect

import torch

from .configs import SPECIAL, VOCABULARY

BATCH, LENGTH, LENGTHS = 3, 12, (12, 7, 4)
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


def inputs(model, case, keep):
    """What the model is called with."""
    parameters = inspect.signature(type(model).forward).parameters
    config = model.config
    text = config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(SPECIAL, VOCABULARY - 4, keep.shape, generator=generator)
    pad = getattr(text, "pad_token_id", None)
    ids = ids.masked_fill(~keep, pad if isinstance(pad, int) else 0)
    given = {"input_ids": ids, "attention_mask": keep.long()}
    if config.is_encoder_decoder and "decoder_input_ids" in parameters and "labels" not in _labels(case, ids, keep):
        # Padded alike, so that nothing tells one sequence's mask from the other's by its shape.
        given["decoder_input_ids"] = ids
    if config.is_encoder_decoder and "decoder_attention_mask" in parameters:
        given["decoder_attention_mask"] = keep.long()
    return {**given, **_labels(case, ids, keep), **_others(config, parameters)}


def _labels(case, ids, keep):
    if case.auto in {"AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"}:
        return {"labels": ids.masked_fill(~keep, -100)}
    if case.auto == "AutoModelForImageTextToText":
        return {"labels": ids.masked_fill(~keep, -100)}
    if case.auto == "AutoModelForTokenClassification":
        return {"labels": (ids % 2).masked_fill(~keep, -100)}
    if case.auto == "AutoModelForSequenceClassification":
        return {"labels": torch.arange(BATCH) % 2}
    if case.auto == "AutoModelForQuestionAnswering":
        positions = keep.long().argmax(1)
        return {"start_positions": positions, "end_positions": positions}
    return {}


def _others(config, parameters):
    """What some models require beside text."""
    given = {}
    required = [name for name, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    wanted = {*required, *(["pixel_values"] if getattr(config, "vision_config", None) is not None else [])}
    if "pixel_values" in wanted and "pixel_values" in parameters and _needs_image(config):
        vision = getattr(config, "vision_config", config)
        size = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
        generator = torch.Generator().manual_seed(1)
        given["pixel_values"] = torch.randn(
            BATCH, getattr(vision, "num_channels", 3), size, size, generator=generator, dtype=torch.float64
        )
    return given


def _needs_image(config):
    """Whether the model gives nothing without an image, as those that compare both."""
    return hasattr(config, "projection_dim") and hasattr(config, "text_config")

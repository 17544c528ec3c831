"""What is swept: every class of transformers' own mappings that reads text."""

import dataclasses
import functools
import inspect
from pathlib import Path

import transformers
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import model_type_to_module_name

CROSS = "AutoModelForCausalLM with cross attention"
"""The decoders that an encoder's output can be given to, with the output of an encoder that is padded as they are."""
MAPPINGS = {
    "AutoModel": auto.MODEL_MAPPING_NAMES,
    "AutoModelForCausalLM": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForSequenceClassification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForMaskedLM": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "AutoModelForTokenClassification": auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForQuestionAnswering": auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "AutoModelForSeq2SeqLM": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForMultimodalLM": auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    CROSS: auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForTextEncoding": auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
}


@dataclasses.dataclass(frozen=True, order=True)
class Case:
    """One class: the mapping that lists it, the kind of its config, and its name."""

    auto: str
    kind: str
    name: str


LEFT_OUT = {
    "vibevoice": "its tokenizer of sound has no small config",
    "vibevoice_asr": "its tokenizer of sound has no small config",
    "vits": "it draws random durations, so that no two of its outputs have one shape",
    "diffusion_gemma": "it draws random tokens, as many as its batch has places, which a packed batch has fewer of",
}
"""Kinds that cannot be compared, and why."""


def cases(only=None, kind=None):
    """Every class of the mappings, in order; whether it reads text is seen when it is loaded."""
    found = []
    for mapping, names in MAPPINGS.items():
        if only and mapping not in only:
            continue
        for each, listed in names.items():
            if (kind and each not in kind) or each in LEFT_OUT:
                continue
            found += [Case(mapping, each, name) for name in ([listed] if isinstance(listed, str) else listed)]
    return found


@functools.cache
def _reads_text(kind):
    """Whether the file of a kind has the words at all: importing those of all images and sounds would take minutes."""
    module = model_type_to_module_name(kind)
    files = Path(transformers.__file__).parent.glob(f"models/{module}/modeling_*.py")
    return any("input_ids" in each.read_text(encoding="utf-8") for each in files)


def class_of(case):
    """The class, or None where it does not read text."""
    if not _reads_text(case.kind):
        return None
    found = getattr(transformers, case.name, None)
    if found is None:
        # Listed by a mapping, and not to be had.
        return None
    parameters = inspect.signature(found.forward).parameters
    if case.auto == CROSS and not (
        "encoder_hidden_states" in parameters and hasattr(found.config_class, "add_cross_attention")
    ):
        return None
    return found if "input_ids" in parameters else None

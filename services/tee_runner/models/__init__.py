"""Model families, checkpoints, tokenizers, identities, and where models come from."""

from tee_runner.models.catalogue import ModelListing, list_models
from tee_runner.models.detokenizer import IncrementalDecoder
from tee_runner.models.families import parse_config
from tee_runner.models.gguf_import import import_gguf
from tee_runner.models.identity import model_identity
from tee_runner.models.loader import LoadedModel, ModelHeader, load_model, read_header
from tee_runner.models.progress import Progress
from tee_runner.models.pull import pull, resolve_model
from tee_runner.models.registry import DEFAULT_MODEL, KNOWN_MODELS
from tee_runner.models.tokenizer import Tokenizer

__all__ = [
    "DEFAULT_MODEL",
    "KNOWN_MODELS",
    "IncrementalDecoder",
    "LoadedModel",
    "ModelHeader",
    "ModelListing",
    "Progress",
    "Tokenizer",
    "import_gguf",
    "list_models",
    "load_model",
    "model_identity",
    "parse_config",
    "pull",
    "read_header",
    "resolve_model",
]

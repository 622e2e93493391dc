"""What the library `datasets` says of the columns of a Parquet file, in its schema: images, lists, labels."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from interop.datasets.described import json_of

if TYPE_CHECKING:
    import pyarrow as pa

Feature = Any  # a part of the JSON; None for one that is not known
_LISTS = ("List", "LargeList", "Sequence")
_IN_ARROW = {
    "Value",
    "ClassLabel",
    "Array2D",
    "Array3D",
    "Array4D",
    "Array5D",
    "Translation",
    "Json",
}  # Arrow types say all


def library_metadata(features: Mapping[str, object]) -> dict[str, str]:
    """The metadata of a schema of Arrow in which the library `datasets` looks for the features of columns."""
    return {"huggingface": json.dumps({"info": {"features": dict(features)}})}


def features_of(schema: "pa.Schema", where: str) -> Mapping[str, Feature]:
    """The features of a schema by column; empty where there are none. CorruptDatasetError for other text than JSON."""
    text = (schema.metadata or {}).get(b"huggingface")
    if text is None:
        return {}
    features = json_of(text, f"{where}, the entry 'huggingface' of its schema")
    for step in ("info", "features"):
        features = features.get(step) if isinstance(features, dict) else None
    return features if isinstance(features, dict) else {}


def is_image(feature: Feature) -> bool:
    """Whether a column has encoded images: the bytes, or structs of bytes and path."""
    return _name(feature) == "Image"


def element_of(feature: Feature) -> Feature:
    """The feature of the elements of a list."""
    if isinstance(feature, list):
        return feature[0] if feature else None
    return feature.get("feature") if _name(feature) in _LISTS else None


def field_of(feature: Feature, name: str) -> Feature:
    """The feature of a field of a struct. A sequence of structs is stored as a struct of lists."""
    if _name(feature) in _LISTS or isinstance(feature, list):
        inner = field_of(element_of(feature), name)
        return None if inner is None else [inner]
    return feature.get(name) if isinstance(feature, dict) and _name(feature) is None else None


def other_kind(feature: Feature) -> str | None:
    """The name of a feature that neither Arrow types nor this module explain, such as "Audio" or "Video"."""
    name = _name(feature)
    return None if name is None or name in _IN_ARROW or name in _LISTS or name == "Image" else name


def _name(feature: Feature) -> str | None:
    name = feature.get("_type") if isinstance(feature, dict) else None
    return name if isinstance(name, str) else None

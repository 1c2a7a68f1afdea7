"""What every section of the config is."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of the config: unknown keys and wrong types are errors, and nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

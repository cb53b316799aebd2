"""The section ``execution``: what changes speed and memory, and never what is guaranteed.

A run may go on with another one (not one of ``individual``): no field enters the fingerprint of a
configuration.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from dpfl_jax.config.base import Section

Strategy = Literal["auto", "vmap", "scan", "ghost"]
AttentionForm = Literal["auto", "plain", "blockwise"]


class MeshConfig(Section):
    """How devices are arranged.

    Attributes:
      data: copies of the parameters, each with its share of the units; default as many as fit.
      fsdp: parts of parameters, optimiser state, sums and noise; units are split over them too.
      tensor: parts of each layer's products.
      sequence: parts of each example's positions, where not even one example fits on a device
        (language models).
    """

    data: int | None = Field(None, gt=0)
    fsdp: int = Field(1, gt=0)
    tensor: int = Field(1, gt=0)
    sequence: int = Field(1, gt=0)

    @property
    def axes(self) -> dict[str, Any]:
        """Arguments of ``mesh.make_mesh``."""
        return self.model_dump()


class Execution(Section):
    """How a run computes its steps.

    Attributes:
      profile: of so many turns of the loop (steps, rounds, blocks), after the first one, what the
        devices did is written to ``profile/`` of the run directory, for xprof or Perfetto. It tells
        how long each took, and is outside the guarantee.
      microbatch_size: units per device processed at once (default 16), or in a silo (default 32);
        of a unit there with more records (a person, a batch), so many records one after the other.
      strategy: how clipped gradients are computed.
      group_buckets: process users with few examples in buffers with a smaller group axis (1, 2, 4,
        ...), instead of padding them to the group size: less work, a longer compilation.
      packing: lay short sequences of a unit one behind the other into rows of at most so many
        shapes, each seeing itself alone, instead of filling each up to ``data.seq_len``; 0: no. Few
        places are then without a token (8 shapes: one in four, 16: one in six), and compilation
        takes as often as long. The shapes follow from the lengths of the sequences, about which
        step times and memory then tell.
      examples_at_once: examples of a user (ULS) that a device processes at once; the gradients of
        the rest are accumulated before the user's norm is taken. Needed where a user's examples do
        not fit together. Default: all.
      split_users: share out each user's examples (ULS) to the fsdp devices, of which each then
        forms a part of the gradient, instead of one user a device. Needed where no device holds a
        whole gradient.
      attention: of a transformer: ``plain`` holds the scores of all positions with all,
        ``blockwise`` those of two blocks, so that memory grows with the length alone; ``auto``:
        plain up to 1,024 positions.
      mesh: how devices are arranged.
      width: silos of a device that are vmapped (1 is fastest on a CPU).
      chunk_silos: silos whose data are on the devices at once; default by size.
      rounds_per_block: where silos trust no server, rounds from one row of metrics to the next.

    Examples:
      >>> import dpfl_jax as dpfl
      >>> dpfl.Execution(microbatch_size=32).strategy
      'auto'
    """

    profile: int = Field(0, ge=0)
    microbatch_size: int = Field(16, gt=0)
    strategy: Strategy = "auto"
    attention: AttentionForm = "auto"
    group_buckets: bool = False
    packing: int = Field(0, ge=0)
    examples_at_once: int | None = Field(None, gt=0)
    split_users: bool = False
    mesh: MeshConfig = MeshConfig()
    width: int = Field(1, gt=0)
    chunk_silos: int | None = Field(None, gt=0)
    rounds_per_block: int = Field(5, gt=0)

    @property
    def unpacked(self) -> Execution:
        """Every example a row, which is what plans and bills price."""
        return self.model_copy(update={"packing": 0})

    @property
    def cut(self) -> dict[str, Any]:
        """How users are cut up."""
        return {"examples_at_once": self.examples_at_once, "split_users": self.split_users}

"""The last collectives of this process, from torch's flight recorder.

The recorder keeps what every process group was asked to do in a ring of `RECORDS` entries, if the environment
variable `RECORDS_VARIABLE` is set before the first group is made (the training command does). It costs a few
microseconds a collective.
"""

from __future__ import annotations

import json
from typing import Any

# torch 2.11 has no public reader for what its recorder keeps.
from torch._C._distributed_c10d import _dump_fr_trace_json, _dump_nccl_trace_json

RECORDS_VARIABLE = "TORCH_FR_BUFFER_SIZE"
RECORDS = 200


def last_collectives(count: int = 8) -> list[dict[str, Any]]:
    """The latest `count` collectives over all groups, oldest first; empty where none is recorded.

    Each: `name`; `group`, and `number` within that group, equal on all its ranks; `shapes` of the inputs;
    `done`, whether it is known to be over.
    """
    entries = [
        entry
        for dump in (_dump_fr_trace_json, _dump_nccl_trace_json)
        for entry in json.loads(dump()).get("entries", [])
    ]
    entries.sort(key=lambda entry: entry["time_created_ns"])
    return [
        {
            "name": entry["profiling_name"],
            "group": entry["process_group"][1],
            "number": entry["collective_seq_id"],
            "shapes": entry["input_sizes"],
            "done": entry["retired"] or entry["state"] == "completed",
        }
        for entry in entries[-count:]
    ]

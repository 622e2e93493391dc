"""A run of TransferQueue over a folder, as a program: it takes commands from stdin, one a line, and prints its answers."""

import sys

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

import interop.transfer_queue


@ray.remote(num_cpus=0)
class Generator:
    """Puts groups from another process, which has not called `register`."""

    def put(self, group: int) -> None:
        tq.init()
        keys = [f"{group}-{number}" for number in range(4)]
        fields = {"answer": torch.full((4, 3), group), "text": [f"{group}: {number}" for number in range(4)]}
        tq.kv_batch_put(keys, "train", TensorDict(fields, [4]), [{"complete": True, "group": group}] * 4)


def main(path: str) -> None:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    interop.transfer_queue.register()
    tq.init({"backend": {"storage_backend": "FbufFiles", "FbufFiles": {"path": path}}})
    generator = Generator.remote()
    print("ready", flush=True)
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "put":
            ray.get(generator.put.remote(int(argument)))
            print("acknowledged", flush=True)
        elif command == "list":
            listed = tq.kv_list("train").get("train", {})
            print(sorted((key, tag["group"], tag["complete"]) for key, tag in listed.items()), flush=True)
        elif command == "train":  # one group: get it by the controller's sampler, and clear it
            client = tq.get_client()
            meta = client.get_meta(["answer", "text"], 4, "train", mode="fetch", task_name="train")
            batch = client.get_data(meta)
            client.clear_samples(meta)
            print(batch["answer"].values().tolist() + [int(text.split(":")[0]) for text in batch["text"]], flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

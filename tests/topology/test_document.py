import json

from kvxfer.topology import domain_groups
from kvxfer.topology.document import as_document
from tests.topology.hosts import recorded


def test_json_holds_devices_and_groups() -> None:
    found = recorded("dgx")
    document = json.loads(json.dumps(as_document(found, domain_groups(found))))
    assert document["topology"]["numa_nodes"][1] == {"number": 1, "cpus": "56-111,168-223"}
    place = {"numa_node": 0, "cpus": "0-55,112-167"}
    switch = ["pci0000:15", "0000:15:01.0", "0000:16:00.0"]
    assert document["topology"]["gpus"][0] == {
        "index": 0,
        "vendor": "nvidia",
        "pci_path": [*switch, "0000:17:02.0", "0000:1b:00.0"],
        **place,
    }
    assert document["topology"]["nics"][0] == {
        "name": "mlx5_0",
        "driver": "mlx5_core",
        "netdev": "ibp24s0",
        "fabric": "verbs",
        "active": True,
        "left_out": None,
        "ports": [
            {
                "number": 1,
                "link_layer": "InfiniBand",
                "state": "ACTIVE",
                "bits_per_second": 400_000_000_000,
            }
        ],
        "pci_path": [*switch, "0000:17:00.0", "0000:18:00.0"],
        **place,
    }
    assert document["groups"][0] == {
        "gpu": 0,
        "nics": ["mlx5_0"],
        "distances": ["PIX"],
        **place,
        "bits_per_second": 400_000_000_000,
    }


def test_a_group_without_gpu_and_nics_says_so() -> None:
    found = recorded("laptop")
    (group,) = as_document(found, domain_groups(found))["groups"]
    assert (group["gpu"], group["nics"], group["cpus"]) == (None, [], "0-15")

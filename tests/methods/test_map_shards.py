"""Maps in half precision come back within its rounding, whatever their size, and shards are complete files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clairvit.errors import BadInput
from clairvit.methods.map_shards import MapShardWriter, list_maps, read_maps, write_shard


def test_maps_come_back_within_half_a_unit_of_half_precision(tmp_path: Path) -> None:
    """Each value within 2⁻¹¹ of its map's largest magnitude, also of tiny, huge and zero maps."""
    maps = torch.randn(4, 5, 7) * torch.tensor([1e-9, 1.0, 1e12, 0.0])[:, None, None]
    write_shard(tmp_path, "0", list("abcd"), ["cat"] * 4, {"ixg": maps, "legrad(layers=2)+plus": -maps})
    stored = read_maps(tmp_path, "ixg")
    assert stored.names == tuple("abcd")
    assert stored.targets == ("cat",) * 4
    largest = maps.abs().flatten(1).amax(1)[:, None, None]
    assert bool(((stored.maps - maps).abs() <= largest * (2**-11 + 2**-22)).all())
    assert read_maps(tmp_path, "legrad(layers=2)+plus").maps.equal(-stored.maps)
    assert read_maps(tmp_path, "ixg", ["c", "a"]).maps.equal(stored.maps[[0, 2]])
    assert list_maps(tmp_path) == {"ixg": 4, "legrad(layers=2)+plus": 4}


def test_a_writer_makes_shards_of_a_size_and_another_for_other_maps(tmp_path: Path) -> None:
    writer = MapShardWriter(tmp_path / "maps", size=2)
    for number in range(3):
        writer.add(f"{number}", "cat", {"ixg": torch.full((2, 2), float(number))})
    writer.add("3", "cat", {"legrad": torch.ones(2, 2)})
    files = writer.close()
    assert [file.name for file in files] == ["maps-00000.npz", "maps-00001.npz", "maps-00002.npz"]
    assert list_maps(tmp_path / "maps") == {"ixg": 3, "legrad": 1}
    assert read_maps(tmp_path / "maps", "ixg").maps[:, 0, 0].tolist() == [0.0, 1.0, 2.0]
    assert [path.name for path in (tmp_path / "maps").iterdir() if path.suffix == ".tmp"] == []


def test_shards_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="There are no map shards"):
        read_maps(tmp_path, "ixg")
    file = write_shard(tmp_path, "0", ["a"], ["cat"], {"ixg": torch.ones(1, 2, 2)})
    with pytest.raises(BadInput, match="hold no maps of legrad; they have: ixg"):
        read_maps(tmp_path, "legrad")
    with pytest.raises(BadInput, match="hold no map of ixg for 'b'"):
        read_maps(tmp_path, "ixg", ["a", "b"])
    write_shard(tmp_path, "1", ["b"], ["cat"], {"ixg": torch.ones(1, 3, 3)})
    with pytest.raises(BadInput, match="have several sizes"):
        read_maps(tmp_path, "ixg")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(BadInput, match="cannot be read"):
        read_maps(tmp_path, "ixg")

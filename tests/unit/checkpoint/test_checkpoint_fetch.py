"""In which order the parts of a commit are asked for."""

import threading

from muster.trainer.checkpoint.fetch import FilePart, read_all

FIRST = 3


class Slow:
    """A reader that takes its time over the first part of a file, in case another is asked for meanwhile."""

    def __init__(self) -> None:
        self.asked: list[FilePart] = []
        self.meanwhile: set[int] = set()
        self.others = {file: threading.Event() for file in (0, 2, 3)}

    def read(self, part: FilePart, into: memoryview) -> None:
        self.asked.append(part)
        if part.index != FIRST:
            self.others[part.file].set()
        elif self.others[part.file].wait(0.05):
            self.meanwhile.add(part.file)


def test_one_part_of_each_file_is_read_before_its_others() -> None:
    reader, nothing = Slow(), memoryview(b"")
    parts = [FilePart(file, index) for file in reader.others for index in range(FIRST, 9)]
    read_all(reader, [(part, nothing) for part in parts], streams=4)  # type: ignore[arg-type]
    assert sorted(reader.asked) == parts
    assert not reader.meanwhile

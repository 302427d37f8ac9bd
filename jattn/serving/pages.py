"""Pages of the cache, by id: who owns which. Plain Python; nothing here touches a device."""


class PageAllocator:
    """Hands out page ids 0 .. num_pages - 1, each to one owner at a time.

    >>> pages = PageAllocator(4)
    >>> pages.grow("a", 3), pages.grow("b", 2), pages.num_free
    (True, False, 1)
    >>> pages.release("a"); pages.num_free
    4
    """

    def __init__(self, num_pages: int):
        self._free = list(range(num_pages - 1, -1, -1))
        self._owned: dict[object, list[int]] = {}
        self.num_changes = 0
        """Grows with every page that is handed out or given back."""

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def owned(self, owner: object) -> list[int]:
        """Page ids of an owner, in the order of its tokens."""
        return self._owned.get(owner, [])

    def grow(self, owner: object, num_pages: int) -> bool:
        """Make `owner` hold at least `num_pages`. False, and nothing changed, if too few are free."""
        held = self.owned(owner)
        missing = num_pages - len(held)
        if missing <= 0 and held:
            return True
        if missing > len(self._free):
            return False
        self.num_changes += 1
        self._owned[owner] = [*held, *(self._free.pop() for _ in range(missing))]
        return True

    def release(self, owner: object) -> None:
        """Give back every page of an owner."""
        self.num_changes += 1
        self._free.extend(reversed(self._owned.pop(owner, [])))

"""What bounds a step, and how two jobs differ: readers of results that simulate again where they must."""

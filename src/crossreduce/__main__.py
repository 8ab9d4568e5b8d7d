"""``python -m crossreduce``: the same as the command ``crossreduce``."""

from .cli import main

if __name__ == "__main__":
    main()

"""`python -m sartor` is the command `sartor`."""

from sartor.cli import main

if __name__ == "__main__":
    main()

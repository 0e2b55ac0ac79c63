"""`python -m errbar` is `errbar`."""

from errbar.cli import main

if __name__ == "__main__":
    main()

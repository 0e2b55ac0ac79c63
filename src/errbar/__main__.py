"""`python -m errbar` is `errbar`."""

from errbar.cli.main import main

if __name__ == "__main__":
    main()

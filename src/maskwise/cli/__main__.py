"""Let ``python -m maskwise.cli`` do what ``maskwise`` does."""

from maskwise.cli import main

if __name__ == "__main__":
    main()

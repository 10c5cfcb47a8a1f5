"""``python -m sakiyomi`` is the command line."""

from sakiyomi.cli import main

if __name__ == "__main__":
    main()

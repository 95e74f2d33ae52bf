"""`python -m tfos`: the same as the command `tfos`; see tfos.cli.main."""

from tfos.cli.main import main

if __name__ == "__main__":
    main()

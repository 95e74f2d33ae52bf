"""`python -m tfos`: the same as the command `tfos`; see tfos.command."""

from tfos.command import main

if __name__ == "__main__":
    main()

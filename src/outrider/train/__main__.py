"""`python -m outrider.train`: the same commands as `outrider train`."""

if __name__ == "__main__":
    from outrider.train.cli import main

    main()

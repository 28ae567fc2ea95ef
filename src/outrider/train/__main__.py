"""`python -m outrider.train`: the same commands as `outrider train`."""

if __name__ == "__main__":  # corpus workers import this file again under another name
    from outrider.train.cli import main

    main()

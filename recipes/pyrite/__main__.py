"""`python -m recipes.pyrite corpus` and `python -m recipes.pyrite lm`."""

if __name__ == "__main__":  # worker processes import this file under another name
    from recipes.pyrite.cli import main

    main()

"""`python -m recipes.pyrite corpus`, `lm` and `medusa-tree`."""

if __name__ == "__main__":  # worker processes import this file under another name
    from recipes.pyrite.cli import main

    main()

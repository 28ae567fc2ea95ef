"""How releases are made and checked: the sdist, the wheel with the native core, and the steps of the Dockerfile."""

"""Every public function with type hints is a tool. Its docstring is the description."""


def greet(name: str, excited: bool = False) -> str:
    """Greet a person by name."""
    return f"Hello, {name}{'!' if excited else '.'}"

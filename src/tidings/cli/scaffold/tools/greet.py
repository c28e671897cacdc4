"""Every public function with type hints is a tool, and its docstring is the description."""


def greet(name: str, excited: bool = False) -> str:
    """Greet somebody by name."""
    return f"Hello, {name}{'!' if excited else '.'}"

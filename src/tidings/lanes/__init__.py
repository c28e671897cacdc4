"""How frames reach each kind of subscriber."""

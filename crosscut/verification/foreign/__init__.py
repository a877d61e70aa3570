"""Proof of cuts that are not Crosscut's: a module, and any function that cuts the module over several ranks."""

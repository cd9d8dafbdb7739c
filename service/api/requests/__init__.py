"""The bodies that clients send. Each type is declared once: it validates, converts and describes itself.

Unknown fields, wrong types (a boolean is no number, a float no integer) and values out of range are
refused by msgspec with the field's name. `null` means left out, as in the OpenAI API.
"""

"""What a row's answer must be: a schema, a regular expression, one of several texts, or a grammar."""

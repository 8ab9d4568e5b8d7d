"""Parts that several commands use: values of options, files and lines that they write, tables, machines and plans."""

"""What the commands share: values of options, files and lines that they write, tables, machines and plans."""

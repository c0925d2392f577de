"""What more than one service needs; a file is named by its subject."""

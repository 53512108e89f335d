"""Print the commands of a Markdown file: the lines of its ```bash blocks, in order."""

import re
import sys
from pathlib import Path

blocks = re.findall(r"^```bash\n(.*?)^```", Path(sys.argv[1]).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
if not blocks:
    sys.exit(f"{sys.argv[1]} has no bash blocks")
print("\n".join(block.rstrip() for block in blocks))

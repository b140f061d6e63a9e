"""What crosses between processes arrives as the record it was."""

import msgspec

from penstock.ipc.messages import EngineInfo, Ready, ToClient, decoder, encode
from penstock.types.setting_choice import SettingChoice


def test_choices_of_settings_arrive_as_such():
    choice = SettingChoice(name="dtype", value="float32", reason="default on a CPU")
    empty = {int: 1, bool: True, str: "cpu", dict: {}, tuple: ()}
    fields = {
        field.name: empty.get(field.type, empty[dict] if "dict" in str(field.type) else ())
        for field in msgspec.structs.fields(EngineInfo)
    }
    info = EngineInfo(**(fields | {"choices": (choice,)}))
    arrived = decoder(ToClient).decode(encode(Ready(info=info)))
    assert arrived == Ready(info=info) and arrived.info.choices == (choice,)
